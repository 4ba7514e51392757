"""Attention to keys block by block against attention to all of them at once, with gradients, without any other rank."""

import pytest
import torch
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import BlockMask

from modelwright.ops import flex_attention
from modelwright.ops.attention import document_mask, masked_attention_naive
from modelwright.ops.flex_attention import packed_block_mask
from modelwright.parallel.context_parallel import (
    VisibleBlock,
    add_keys,
    empty_output,
    gradients_of_keys,
    visible_blocks,
)

ROW_LEN = 30
QUERY_SPANS = [(5, 10), (20, 25)]
KEY_SPANS = [QUERY_SPANS, [(0, 5), (25, 30)], [(10, 15), (15, 20)]]
"""The queries' own tokens first, then the rest of the row; some of it lies after all queries."""


def segments() -> torch.Tensor:
    """One document over the whole row, and several of odd lengths with padding at the end."""
    segments_BT = torch.zeros(2, ROW_LEN, dtype=torch.int32)
    segments_BT[1, 7:], segments_BT[1, 8:], segments_BT[1, 23:] = 1, 2, -1
    return segments_BT


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(2, ROW_LEN, heads, 8, dtype=torch.float64, generator=generator).to(dtype) for heads in (6, 2, 2)
    ]


def positions(spans: list[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(start, end) for start, end in spans])


def block_mask(segments_BT: torch.Tensor, queries: list[tuple[int, int]], keys: list[tuple[int, int]]) -> BlockMask:
    return packed_block_mask(segments_BT, 0, queries, keys)


@pytest.fixture
def definition(monkeypatch):
    """FlexAttention's definition in operators: its kernel has no backward on a CPU."""
    monkeypatch.setattr(pytorch, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "compiled_kernel", lambda: pytorch.flex_attention)


def assert_parts_are_the_whole(make, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    own = positions(QUERY_SPANS)
    whole = [x.double().requires_grad_() for x in inputs(dtype)]
    expected = masked_attention_naive(*whole, document_mask(segments()))[:, own]
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected_grads = torch.autograd.grad((expected * weights).sum(), whole)

    def assert_close(found: torch.Tensor, reference: torch.Tensor) -> None:
        torch.testing.assert_close(found.double().cpu(), reference.detach(), rtol=tolerance, atol=tolerance)

    q, k, v = (x.to(device) for x in inputs(dtype))
    q = q[:, own]
    visible = [make(segments().to(device), QUERY_SPANS, spans) for spans in KEY_SPANS]
    out, lse = empty_output(q)
    for spans, seen in zip(KEY_SPANS, visible, strict=True):
        add_keys(out, lse, q, k[:, positions(spans)], v[:, positions(spans)], seen)
    out = out.to(dtype)
    assert_close(out, expected)

    grad_q = torch.zeros_like(q, dtype=lse.dtype)
    for spans, seen in zip(KEY_SPANS, visible, strict=True):
        keys = positions(spans)
        parts = gradients_of_keys(weights.to(device, dtype), out, lse, q, k[:, keys], v[:, keys], seen)
        grad_q += parts[0]
        for part, whole_grad in zip(parts[1:], expected_grads[1:], strict=True):
            assert_close(part, whole_grad[:, keys])
    assert_close(grad_q, expected_grads[0][:, own])


@pytest.mark.filterwarnings("ignore")  # PyTorch warns that this is not the fused kernel, and about its own internals
@pytest.mark.usefixtures("definition")
@pytest.mark.parametrize("make", [visible_blocks, block_mask])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.05)]
)
def test_keys_added_one_block_after_another_are_attention_to_all(make, dtype, tolerance):
    assert_parts_are_the_whole(make, dtype, tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_so_they_are_with_the_kernel_itself(dtype, tolerance):
    assert_parts_are_the_whole(block_mask, dtype, tolerance, "cuda")


def test_blocks_are_those_of_the_mask():
    for spans in KEY_SPANS:
        drawn = torch.zeros(2, 10, 10, dtype=torch.bool)
        for row, query_start, query_end, key_start, key_end, is_diagonal in visible_blocks(
            segments(), QUERY_SPANS, spans
        ).blocks:
            square = torch.ones(query_end - query_start, key_end - key_start, dtype=torch.bool)
            drawn[row, query_start:query_end, key_start:key_end] |= square.tril() if is_diagonal else square
        places = torch.arange(10)
        mask = block_mask(segments(), QUERY_SPANS, spans)
        seen = mask.mask_mod(torch.arange(2)[:, None, None], places[0], places[:, None], places)
        assert torch.equal(drawn, seen)
        assert torch.equal(drawn, document_mask(segments())[:, 0, positions(QUERY_SPANS)][:, :, positions(spans)])


def test_whole_spans_before_the_queries_are_one_block():
    row = torch.zeros(1, ROW_LEN, dtype=torch.int32)
    assert visible_blocks(row, [(10, 20)], [(0, 10), (20, 30)]).blocks == [VisibleBlock(0, 0, 10, 0, 10, False)]
