"""Fused packed attention against the naive reference, and its sizes. PyTorch's kernel has no backward on CPUs:
gradients are those of its definition in operators, differentiated through the same mask and score functions.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo import config as dynamo
from torch._functorch.aot_autograd import aot_module_simplified
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelwright.core.config import ModelwrightError
from modelwright.model.attention import fused_attend
from modelwright.model.decoder import AttentionSpec
from modelwright.ops import flex_attention
from modelwright.ops.attention import document_mask, masked_attention_naive
from modelwright.ops.flex_attention import fused_packed_attention, packed_block_mask
from tolerances import TOLERANCES

LONG = 32_768


@pytest.fixture
def differentiable(monkeypatch):
    """Without the check that refuses gradients on a CPU."""
    monkeypatch.setattr(pytorch, "_validate_device", lambda *_: None)
    torch.compiler.reset()  # kernels of other tests would count, and their sizes become symbolic
    flex_attention.compiled_kernel.cache_clear()
    yield functools.partial(monkeypatch.setattr, flex_attention, "compiled_kernel")
    torch.compiler.reset()


def segments_of(*rows: list[int]) -> torch.Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]).int()


def qkv(segments: torch.Tensor, heads: int, kv_heads: int, dim: int = 16) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(*segments.shape, count, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


@settings(deadline=None, max_examples=50)  # PyTorch's own mask takes most of the time
@given(
    lengths=st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=6), min_size=1, max_size=3),
    window=st.sampled_from([0, 1, 5, 128, 130, 500]),
)
def test_the_block_mask_is_that_of_all_pairs(lengths: list[list[int]], window: int) -> None:
    longest = max(map(sum, lengths))
    segments = segments_of(*([*row, longest - sum(row)] if sum(row) < longest else row for row in lengths))
    pairs = document_mask(segments, window)[:, 0]
    expected = create_block_mask(
        lambda row, head, query, key: pairs[row, query, key], len(segments), None, longest, longest, device="cpu"
    )
    mask = packed_block_mask(segments, window)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    assert torch.equal(mask.to_dense(), expected.to_dense())
    places = torch.arange(longest)
    seen = mask.mask_mod(torch.arange(len(segments))[:, None, None], places[0], places[:, None], places)
    assert torch.equal(seen, pairs)


@pytest.mark.filterwarnings("ignore")  # PyTorch warns that this is not the fused kernel, and about its own internals
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "cap"),
    [(4, 2, 16, 0, 0.0), (3, 1, 8, 70, 0.0), (2, 2, 16, 0, 4.0), (4, 1, 24, 5, 2.0)],
)
def test_outputs_and_gradients_are_the_naive_reference(differentiable, heads, kv_heads, dim, window, cap):
    differentiable(lambda: pytorch.flex_attention)
    segments = segments_of([5, 100, 45], [150], [1] * 150)
    inputs = qkv(segments, heads, kv_heads, dim)
    spec = AttentionSpec(0, window, cap)
    out = fused_attend(segments, (window,))(spec, *inputs)
    naive = masked_attention_naive(*inputs, document_mask(segments, window), soft_cap=cap)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    pairs = [(out, naive), *zip(*(torch.autograd.grad(one, inputs, weights) for one in (out, naive)), strict=True)]
    for ours, reference in pairs:
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


@pytest.mark.slow
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (70, 4.0)])
def test_the_compiled_kernel_gives_the_naive_reference_outputs(window, cap):
    segments = segments_of([5, 100, 45], [150])
    q, k, v = (x.detach() for x in qkv(segments, 4, 2, 32))
    out = fused_packed_attention(q, k, v, packed_block_mask(segments, window), cap)
    naive = masked_attention_naive(q, k, v, document_mask(segments, window), soft_cap=cap)
    torch.testing.assert_close(out, naive, **TOLERANCES["fp32_op"])


@pytest.mark.slow
@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
@dynamo.patch(recompile_limit=1)
def test_the_kernel_stays_compiled_over_more_sizes_than_dynamo_allows():
    """Evaluation and alignment have batches of many sizes. Dynamo's own limit of eight is one here."""
    torch.compiler.reset()
    for rows, tokens in [(1, 40), (3, 150), (2, 300)]:
        segments = segments_of(*[[tokens - 30, 30]] * rows)
        q, k, v = (x.detach() for x in qkv(segments, 4, 2, 32))
        out = fused_packed_attention(q, k, v, packed_block_mask(segments))
        naive = masked_attention_naive(q, k, v, document_mask(segments))
        torch.testing.assert_close(out, naive, **TOLERANCES["fp32_op"])


@pytest.mark.slow
def test_more_sizes_than_kernels_is_an_error(differentiable, monkeypatch):
    """Dynamo would run the uncompiled function, which holds the scores of all pairs."""
    monkeypatch.setattr(flex_attention, "KERNELS", 1)

    def attend(tokens):
        segments = segments_of([tokens])
        q, k, v = (x.detach() for x in qkv(segments, 2, 1))
        fused_packed_attention(q, k, v, packed_block_mask(segments))

    attend(30)
    with pytest.raises(ModelwrightError, match="compiled for 1 sizes of batches"):
        attend(40)


class Largest(TorchDispatchMode):
    """The largest number of elements that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def test_the_mask_of_a_long_row_has_nothing_of_all_pairs():
    with Largest() as largest:
        packed_block_mask(segments_of([20_000, 2_768, 10_000]), 4096)
    assert largest.elements <= (LONG // flex_attention.BLOCK + 1) ** 2


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
def test_forward_and_backward_of_a_long_row_have_nothing_of_all_pairs(differentiable):
    """The graphs that a compiler gets, at 32,768 tokens; they are not run."""
    sizes, kernels = [], []

    def look(graph, _):
        for node in graph.graph.nodes:
            values = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
            sizes.extend(x.numel() for x in values)
            kernels.append(str(node.target))
        results = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        shapes = [None if one is None else one.meta["val"] for one in results]

        def run(*_):
            return [x if x is None else torch.zeros(x.shape, dtype=x.dtype) for x in shapes]

        return run

    def backend(graph, inputs):
        def boxed(module, arguments):
            run = look(module, arguments)

            def call(arguments):
                arguments.clear()
                return run()

            call._boxed_call = True
            return call

        return aot_module_simplified(graph, inputs, fw_compiler=boxed, bw_compiler=boxed)

    differentiable(lambda: torch.compile(pytorch.flex_attention, backend=backend, fullgraph=True))
    segments = segments_of([20_000, 2_768, 10_000])
    inputs = qkv(segments, 2, 1)
    fused_packed_attention(*inputs, packed_block_mask(segments, 4096), 5.0).sum().backward()
    assert {"flex_attention", "flex_attention_backward"} <= set(kernels)
    assert max(sizes) <= 2 * LONG * 16
