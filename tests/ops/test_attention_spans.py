"""Attention with a sliding window and with a soft cap, and scaled rotary positions, against their definitions."""

import pytest
import torch

from modelwright.ops.attention import (
    capped_attention,
    causal_attention,
    document_mask,
    masked_attention_naive,
    masked_capped_attention,
    packed_attention,
    packed_cuts,
    packed_tiles,
    whole_rows,
)
from modelwright.ops.rope_norm_swiglu import RopeScaling, apply_rope, document_lengths, rope_tables, scaled_rope_tables
from tolerances import TOLERANCES

SEGMENTS = torch.tensor([[0] * 37 + [1] * 3 + [-1] * 1, [0] * 1 + [1] * 20 + [2] * 20], dtype=torch.int32)
SOFT_CAP = 1.5


def qkv(head_dim: int, num_tokens: int = SEGMENTS.shape[1]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, num_tokens, heads, head_dim, generator=draw, requires_grad=True) for heads in (6, 2, 2)]


def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def assert_same(fast: list[torch.Tensor], naive: list[torch.Tensor]) -> None:
    torch.testing.assert_close(fast[0], naive[0], **TOLERANCES["fp32_op"])
    for ours, reference in zip(fast[1:], naive[1:], strict=True):
        torch.testing.assert_close(ours, reference, **TOLERANCES["fp32_gradient"])


@pytest.mark.parametrize("head_dim", [6, 16])
@pytest.mark.parametrize("tile_len", [3, 128])
@pytest.mark.parametrize("window", [1, 2, 7, 19, 36, 37, 50])
def test_windows_equal_the_definition(window: int, tile_len: int, head_dim: int) -> None:
    """A width of 16 is one that this package's own kernels take, which do not know windows."""
    inputs = qkv(head_dim)
    tiles = packed_tiles(SEGMENTS, tile_len, window=window)
    assert tiles.window == (window if window < 37 else 0), "a window that no document exceeds is none"
    naive = masked_attention_naive(*inputs, document_mask(SEGMENTS, window))
    assert_same(with_gradients(packed_attention(*inputs, tiles), inputs), with_gradients(naive, inputs))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("tile_len", [4, 128])
def test_soft_caps_equal_the_definition(window: int, tile_len: int) -> None:
    inputs = qkv(10)
    mask = document_mask(SEGMENTS, window)
    naive = with_gradients(masked_attention_naive(*inputs, mask, soft_cap=SOFT_CAP), inputs)
    tiles = packed_tiles(SEGMENTS, tile_len, window=window)
    assert_same(with_gradients(capped_attention(*inputs, tiles, SOFT_CAP), inputs), naive)
    assert_same(with_gradients(masked_capped_attention(*inputs, mask, SOFT_CAP), inputs), naive)
    without = masked_attention_naive(*inputs, mask)
    assert (without - naive[0]).abs().max() > 0.05


def test_soft_caps_of_rows_that_are_not_cut() -> None:
    inputs = qkv(10)
    naive = masked_attention_naive(*inputs, document_mask(SEGMENTS), soft_cap=SOFT_CAP)
    found = capped_attention(*inputs, whole_rows(SEGMENTS), SOFT_CAP)
    torch.testing.assert_close(found, naive, **TOLERANCES["fp32_op"])


def test_windows_of_some_queries_of_a_row() -> None:
    """As in context parallelism, where a rank holds two spans of each row."""
    spans = [(5, 15), (30, 40)]
    q, k, v = qkv(6)
    mine = torch.cat([q[:, start:end] for start, end in spans], dim=1)
    tiles = packed_tiles(SEGMENTS, 4, spans=spans, window=6)
    whole = masked_attention_naive(q, k, v, document_mask(SEGMENTS, 6))
    expected = torch.cat([whole[:, start:end] for start, end in spans], dim=1)
    torch.testing.assert_close(packed_attention(mine, k, v, tiles), expected, **TOLERANCES["fp32_op"])


def test_narrow_formats_of_windows_and_caps() -> None:
    exact = [x.detach() for x in qkv(6)]
    inputs = [x.bfloat16() for x in exact]
    for out, soft_cap in (
        (packed_attention(*inputs, packed_cuts(SEGMENTS, 5)), 0.0),
        (capped_attention(*inputs, packed_cuts(SEGMENTS, 5), SOFT_CAP), SOFT_CAP),
    ):
        assert out.dtype == torch.bfloat16
        naive = masked_attention_naive(*exact, document_mask(SEGMENTS, 5), soft_cap=soft_cap)
        torch.testing.assert_close(out.float(), naive, **TOLERANCES["bf16_op"])


@pytest.mark.parametrize("window", [0, 4, 100])
def test_whole_rows_within_a_window(window: int) -> None:
    inputs = qkv(6)
    naive = masked_attention_naive(*inputs, document_mask(torch.zeros(2, SEGMENTS.shape[1]), window))
    torch.testing.assert_close(causal_attention(*inputs, window), naive, **TOLERANCES["fp32_op"])


def test_lengths_follow_from_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert document_lengths(positions).tolist() == [[3, 3, 3, 2, 2, 1], [6] * 6]
    assert document_lengths(positions[:1, 1:]).tolist() == [[3, 3, 2, 2, 1]], "rows may begin within a document"


@pytest.mark.parametrize("head_dim", [12, 64])
def test_part_of_a_head_is_rotated_with_gradients(head_dim: int) -> None:
    """64 of 96 dimensions are rotated by a kernel, and an attention factor scales them."""
    positions = torch.arange(7).expand(2, 7)
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_len=8)
    cos, sin = scaled_rope_tables(positions, positions, head_dim, 1e4, scaling)
    x = torch.randn(2, 7, 3, head_dim + 32, requires_grad=True)
    half = head_dim // 2
    first, second, rest = x.split((half, half, 32), dim=-1)
    turned = (first * cos[..., :half] - second * sin[..., half:], second * cos[..., half:] + first * sin[..., half:])
    assert_same(with_gradients(apply_rope(x, cos, sin), [x]), with_gradients(torch.cat((*turned, rest), dim=-1), [x]))


def test_frequencies_depend_on_the_length_of_the_own_document_only() -> None:
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_max_len=4)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    cos, _ = scaled_rope_tables(positions, document_lengths(positions), 8, 1e4, scaling)
    plain, _ = rope_tables(positions, 8, 1e4)
    assert torch.equal(cos[:, :3], plain[:, :3])
    assert not torch.equal(cos[:, 4:], plain[:, 4:])
