"""Fused packed attention against the naive reference, and its sizes. PyTorch's kernel has no backward on CPUs:
gradients are those of its definition in operators, differentiated through the same mask and score functions.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo import config as dynamo
from torch._functorch.aot_autograd import aot_module_simplified
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._pytree import tree_leaves

from largest_output import largest_tensor
from modelwright.core.config import ModelwrightError
from modelwright.model.attention import fused_attend, masked_attend
from modelwright.model.decoder import AttentionSpec
from modelwright.ops import flex_attention
from modelwright.ops.attention import document_mask, masked_attention_naive
from modelwright.ops.flex_attention import BLOCK, fused_packed_attention, fused_partial_attention, packed_block_mask
from modelwright.parallel.context_parallel import local_spans
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


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 1500), min_size=4, max_size=9),
    window=st.sampled_from([0, 5, 130, 500]),
)
def test_the_block_mask_of_some_tokens_leaves_no_visible_pair_out(
    lengths: list[int], cuts: list[int], window: int
) -> None:
    """As on a rank of several: a block that is skipped has no visible pair, and a full one has no other."""
    segments = segments_of(lengths)
    row_len = sum(lengths)
    ends = sorted({min(cut, row_len) for cut in cuts} | {0, row_len})
    chunks = list(itertools.pairwise(ends))
    for queries, keys in ((chunks[::2], None), (chunks[::2], chunks[::2]), (chunks[-1:], chunks[:-1] or chunks)):
        mask = packed_block_mask(segments, window, queries, keys)
        pairs = document_mask(segments, window)[0, 0]
        pairs = pairs[torch.cat([torch.arange(*span) for span in queries])]
        pairs = pairs if keys is None else pairs[:, torch.cat([torch.arange(*span) for span in keys])]
        rows, columns = (torch.arange(size) for size in pairs.shape)
        assert torch.equal(mask.mask_mod(torch.tensor(0), rows[0], rows[:, None], columns), pairs)
        for block, (query, key) in enumerate(itertools.product(*(range(0, size, BLOCK) for size in pairs.shape))):
            number, place = divmod(block, -(-pairs.shape[1] // BLOCK))
            inside = pairs[query : query + BLOCK, key : key + BLOCK]
            partial = mask.kv_indices[0, 0, number, : mask.kv_num_blocks[0, 0, number]]
            full = mask.full_kv_indices[0, 0, number, : mask.full_kv_num_blocks[0, 0, number]]
            assert (inside.numel() == BLOCK**2 and bool(inside.all())) == (place in full)
            assert place in full or place in partial or not inside.any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (70, 4.0)])
def test_some_queries_of_a_row_are_the_naive_reference(differentiable, window, cap):
    """Context parallelism: a rank's queries, and the keys of whole rows."""
    differentiable(lambda: pytorch.flex_attention)
    segments, spans = segments_of([5, 100, 155], [260]), [(65, 130), (130, 195)]
    spec, inputs = AttentionSpec(0, window, cap), qkv(segments, 4, 2)
    own = torch.cat([torch.arange(*span) for span in spans])
    naive = masked_attention_naive(*inputs, document_mask(segments, window), soft_cap=cap)[:, own]
    for attend in (fused_attend, masked_attend):
        out = attend(segments, (window,), spans)(spec, inputs[0][:, own], *inputs[1:])
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        pairs = [(out, naive), *zip(*(torch.autograd.grad(one, inputs, weights, retain_graph=True)
                                      for one in (out, naive)), strict=True)]  # fmt: skip
        for ours, reference in pairs:
            torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


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


OWN_SPANS = local_spans(LONG, 2, 0)
"""The tokens of one of two ranks."""


@pytest.mark.parametrize("spans", [None, OWN_SPANS])
def test_the_mask_of_a_long_row_has_nothing_of_all_pairs(spans):
    segments = segments_of([20_000, 2_768, 10_000])
    largest = largest_tensor(lambda: packed_block_mask(segments, 4096, spans, spans))
    assert largest <= (LONG // flex_attention.BLOCK + 1) ** 2


def whole_rows(q, k, v, segments):
    return fused_packed_attention(q, k, v, packed_block_mask(segments, 4096), 5.0)


def own_queries(q, k, v, segments):
    return fused_packed_attention(q[:, : LONG // 2], k, v, packed_block_mask(segments, 4096, OWN_SPANS), 5.0)


def own_queries_and_keys(q, k, v, segments):
    mask = packed_block_mask(segments, 0, OWN_SPANS, OWN_SPANS)
    out, lse = fused_partial_attention(*(x[:, : LONG // 2] for x in (q, k, v)), mask)
    return out + lse.unsqueeze(-1)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
@pytest.mark.parametrize("attend", [whole_rows, own_queries, own_queries_and_keys])
def test_forward_and_backward_of_a_long_row_have_nothing_of_all_pairs(differentiable, attend):
    """The graphs that a compiler gets, at 32,768 tokens; they are not run. On one process, and on one of two that share
    rows by an all-gather or a ring.
    """
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
    attend(*inputs, segments).sum().backward()
    assert {"flex_attention", "flex_attention_backward"} <= set(kernels)
    assert max(sizes) <= 2 * LONG * 16
