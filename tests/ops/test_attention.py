"""Tiled packed attention and the masked forms against the naive twin, outputs and gradients."""

import pytest
import torch

from modelwright.ops import cpu_kernels
from modelwright.ops.attention import (
    Tiles,
    causal_attention,
    document_mask,
    masked_attention,
    masked_attention_naive,
    packed_attention,
    packed_cuts,
    packed_tiles,
    whole_rows,
)
from tolerances import TOLERANCES

pytestmark = pytest.mark.usefixtures("either_way")

WHOLE = 0
"""In place of a tile's length: rows are not cut."""
LAYOUTS = {
    "one document": [[13], [13]],
    "several": [[5, 1, 7], [12, 1]],
    "single tokens": [[1] * 13, [6, 7]],
    "one row": [[3, 10]],
    "long": [[33, 67], [100]],
}


def make_segments(lengths: list[list[int]]) -> torch.Tensor:
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows).to(torch.int32)


def cut(segments: torch.Tensor, tile_len: int) -> Tiles:
    return whole_rows(segments) if tile_len == WHOLE else packed_tiles(segments, tile_len)


def make_qkv(segments: torch.Tensor, heads: int, kv_heads: int, dim: int = 8, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(*segments.shape, count, dim) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def outputs_and_gradients(out, inputs):
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, inputs, weights)


@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("tile_len", [4, 32, 128, WHOLE])
def test_packed_equals_naive(lengths, heads, kv_heads, tile_len):
    segments = make_segments(lengths)
    inputs = make_qkv(segments, heads, kv_heads)
    fast = outputs_and_gradients(packed_attention(*inputs, cut(segments, tile_len)), inputs)
    naive = outputs_and_gradients(masked_attention_naive(*inputs, document_mask(segments)), inputs)
    for ours, reference in zip(fast, naive, strict=True):
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


def test_masked_equals_naive():
    segments = make_segments([[5, 1, 7], [12, 1]])
    inputs = make_qkv(segments, 6, 2)
    mask = document_mask(segments)
    fast = outputs_and_gradients(masked_attention(*inputs, mask), inputs)
    naive = outputs_and_gradients(masked_attention_naive(*inputs, mask), inputs)
    for ours, reference in zip(fast, naive, strict=True):
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


def test_causal_equals_one_document():
    segments = torch.zeros(2, 9, dtype=torch.int32)
    inputs = make_qkv(segments, 4, 2)
    naive = masked_attention_naive(*inputs, document_mask(segments))
    torch.testing.assert_close(causal_attention(*inputs), naive, **TOLERANCES["fp32_op"])


def test_padding_is_finite():
    segments = torch.tensor([[0, 0, 1, -1, -1]])
    inputs = make_qkv(segments, 2, 1)
    for out in (
        packed_attention(*inputs, packed_tiles(segments)),
        packed_attention(*inputs, whole_rows(segments)),
        masked_attention(*inputs, document_mask(segments)),
    ):
        assert all(x.isfinite().all() for x in outputs_and_gradients(out, inputs))


@pytest.mark.parametrize("tile_len", [32, WHOLE])
def test_bf16_and_mixed_formats(tile_len):
    segments = make_segments([[33, 67], [100]])
    inputs = make_qkv(segments, 4, 2, dtype=torch.bfloat16)
    tiles = cut(segments, tile_len)
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)
    exact_inputs = (q, k, v)
    exact = outputs_and_gradients(masked_attention_naive(*exact_inputs, document_mask(segments)), exact_inputs)
    fast = outputs_and_gradients(packed_attention(*inputs, tiles), inputs)
    assert fast[0].dtype == torch.bfloat16
    for ours, reference in zip(fast, exact, strict=True):
        torch.testing.assert_close(ours.float(), reference, **TOLERANCES["bf16_gradient"])
    mixed = packed_attention(exact_inputs[0], exact_inputs[1], inputs[2], tiles)
    assert torch.equal(mixed, fast[0])


@pytest.mark.parametrize("tile_len", [4, WHOLE])
def test_operator_is_sound_under_compile(tile_len):
    segments = make_segments([[5, 8], [13]])
    inputs = make_qkv(segments, 4, 2)
    tiles = cut(segments, tile_len)
    torch.library.opcheck(
        torch.ops.modelwright.packed_attention.default,
        (*inputs, tiles.bounds_P5, tiles.bias, tiles.window > 0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("lengths", "is_cut"),
    [
        ([[128]] * 16, False),
        ([[30, 40, 30, 28]] * 16, False),
        ([[256]] * 2, True),
        ([[60] * 8 + [32]] * 8, True),
        ([[512]] * 8, True),
        ([[2048]], True),
        ([[1] * 512] * 2, False),
        ([[1] * 640] * 2, True),
    ],
)
def test_rows_are_cut_where_that_saves_more_than_it_costs(lengths, is_cut):
    is_cut |= "attention" in cpu_kernels.used()  # tiles cost nothing beside their products there
    segments = make_segments(lengths)
    cuts = packed_cuts(segments)
    assert bool(len(cuts.bounds_P5)) == is_cut
    assert (cuts.bias.dim() == 4) == (not is_cut)


def test_tiles_cover_every_token_once():
    segments = make_segments([[33, 67], [100]])
    seen = torch.zeros(segments.shape, dtype=torch.int64)
    for row, start, first, end, at in packed_tiles(segments, 16).bounds_P5.tolist():
        seen[row, first:end] += 1
        assert at == first
        assert segments[row, start:end].unique().numel() == 1
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.parametrize("tile_len", [4, WHOLE])
def test_packed_attention_keeps_float64(tile_len) -> None:
    segments = torch.tensor([[0] * 5 + [1] * 9, [0] * 14], dtype=torch.int32)
    q, k, v = make_qkv(segments, 4, 2, dtype=torch.float64)
    fast = packed_attention(q, k, v, cut(segments, tile_len))
    exact = masked_attention_naive(q, k, v, document_mask(segments))
    for ours, reference in zip(
        torch.autograd.grad(fast.sin().sum(), (q, k, v)),
        torch.autograd.grad(exact.sin().sum(), (q, k, v)),
        strict=True,
    ):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spans", [[(0, 3), (10, 13)], [(5, 6)], [(3, 10)], [(7, 13), (0, 2)]])
@pytest.mark.parametrize("tile_len", [2, 128])
def test_some_queries_of_each_row(spans, tile_len) -> None:
    segments = make_segments([[5, 1, 7], [12, 1]])
    q, k, v = make_qkv(segments, 4, 2)
    own = torch.cat([torch.arange(*span) for span in spans])
    fast = packed_attention(q[:, own], k, v, packed_tiles(segments, tile_len, spans=spans))
    naive = masked_attention_naive(q, k, v, document_mask(segments))[:, own]
    for ours, reference in zip(
        outputs_and_gradients(fast, (q, k, v)), outputs_and_gradients(naive, (q, k, v)), strict=True
    ):
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])
