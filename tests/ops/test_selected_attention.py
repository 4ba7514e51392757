"""Attention at the open heads alone, by the kernel and by PyTorch's calls, against masking the output of all heads."""

import itertools
from typing import Any

import pytest
import torch

from modelwright.ops import cpu_kernels
from modelwright.ops.attention import (
    Tiles,
    document_mask,
    masked_attention_naive,
    packed_attention,
    packed_tiles,
    whole_rows,
)
from modelwright.ops.selected_attention import selected_attention
from tolerances import TOLERANCES

SEGMENTS = torch.tensor([[0] * 150 + [1] * 3 + [-1] * 7, [0] * 1 + [1] * 79 + [2] * 80], dtype=torch.int32)
NUM_TOKENS = SEGMENTS.shape[1]
EXACT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(params=["kernel", "PyTorch"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernel" and not cpu_kernels.instruction_set():
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setenv(cpu_kernels.SWITCH, "attention" if request.param == "kernel" else "0")
    return request.param


def qkv(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32, dim: int = 16) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, NUM_TOKENS, count, dim, generator=draw).to(dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def decisions(heads: int, share: float) -> torch.Tensor:
    """Heads differ; with a share between 0 and 1 the first is always closed and the second always open."""
    open_BTH = torch.rand(2, NUM_TOKENS, heads, generator=torch.Generator().manual_seed(1)) < share
    if 0 < share < 1 and heads > 1:
        open_BTH[:, :, 0], open_BTH[:, :, 1] = False, True
    return open_BTH


def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def naive(inputs: list[torch.Tensor], open_BTH: torch.Tensor, window: int = 0) -> torch.Tensor:
    return masked_attention_naive(*inputs, document_mask(SEGMENTS, window)) * open_BTH[..., None]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor], **tolerances: Any) -> None:
    own = tolerances or TOLERANCES["fp32_op"]
    torch.testing.assert_close(found[0], wanted[0], **own)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one, other, **(tolerances or TOLERANCES["fp32_gradient"]))


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("tile_len", [10, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (1, 1)])
def test_equals_the_masked_output(side: str, heads: int, kv_heads: int, tile_len: int, share: float) -> None:
    inputs, open_BTH = qkv(heads, kv_heads), decisions(heads, share)
    found = selected_attention(*inputs, open_BTH, packed_tiles(SEGMENTS, tile_len))
    assert torch.equal(found == 0, ~open_BTH[..., None].expand_as(found))
    assert_same(with_gradients(found, inputs), with_gradients(naive(inputs, open_BTH), inputs))


@pytest.mark.parametrize("window", [0, 1, 7, 64, 200])
def test_is_exact_in_fp64_with_windows(side: str, window: int) -> None:
    inputs, open_BTH = qkv(6, 2, torch.float64, dim=10), decisions(6, 0.4)
    found = selected_attention(*inputs, open_BTH, packed_tiles(SEGMENTS, window=window))
    assert_same(with_gradients(found, inputs), with_gradients(naive(inputs, open_BTH, window), inputs), **EXACT)


def test_rows_that_are_not_split(side: str) -> None:
    inputs, open_BTH = qkv(6, 2), decisions(6, 0.4)
    found = selected_attention(*inputs, open_BTH, whole_rows(SEGMENTS))
    assert_same(with_gradients(found, inputs), with_gradients(naive(inputs, open_BTH), inputs))


@pytest.mark.parametrize("spans", [[(5, 45), (90, 130)], [(90, 130), (5, 45)]], ids=["ascending", "descending"])
def test_some_queries_of_a_row(side: str, spans: list[tuple[int, int]]) -> None:
    """As in context parallelism, and in a chunk of a prompt."""
    inputs, open_BTH = qkv(4, 2), decisions(4, 0.5)
    own_S = torch.tensor(list(itertools.chain(*(range(*span) for span in spans))))
    found = selected_attention(
        inputs[0][:, own_S], inputs[1], inputs[2], open_BTH[:, own_S], packed_tiles(SEGMENTS, 16, spans=spans)
    )
    wanted = naive(inputs, open_BTH)[:, own_S]
    assert_same(with_gradients(found, inputs), with_gradients(wanted, inputs))


def test_bf16(side: str) -> None:
    inputs, open_BTH = qkv(4, 2, torch.bfloat16), decisions(4, 0.5)
    wide = [one.detach().float().requires_grad_() for one in inputs]
    found = with_gradients(selected_attention(*inputs, open_BTH, packed_tiles(SEGMENTS)), inputs)
    wanted = with_gradients(naive(wide, open_BTH), wide)
    assert found[0].dtype == torch.bfloat16
    assert_same([one.float() for one in found], wanted, **TOLERANCES["bf16_gradient"])


def test_with_all_heads_open_it_is_packed_attention_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an open head's numbers do not depend on which others are open, nor on the number of threads."""
    if not cpu_kernels.instruction_set():
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setenv(cpu_kernels.SWITCH, "attention")
    inputs, tiles = qkv(4, 2), packed_tiles(SEGMENTS)
    whole = with_gradients(packed_attention(*inputs, tiles), inputs)
    found = with_gradients(selected_attention(*inputs, decisions(4, 1.0), tiles), inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    open_BTH = decisions(4, 0.4)
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(with_gradients(selected_attention(*inputs, open_BTH, tiles), inputs))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert torch.equal(results[0][0][open_BTH], whole[0][open_BTH])


def test_what_is_closed_is_not_computed(side: str) -> None:
    """Queries of closed heads that are no numbers, and keys that no open query sees, change nothing."""
    (q, k, v), open_BTH = (one.detach() for one in qkv(4, 2)), decisions(4, 0.5)
    tiles: Tiles = packed_tiles(SEGMENTS)
    open_BTH[0, :, :2] = False  # all of the first key/value head in the first row
    expected = selected_attention(q, k, v, open_BTH, tiles)
    k[0, :, 0] = v[0, :, 0] = float("nan")
    q = q.masked_fill(~open_BTH[..., None], float("nan"))
    assert torch.equal(selected_attention(q, k, v, open_BTH, tiles), expected)


def test_the_operator_is_registered_whole() -> None:
    inputs, tiles = qkv(4, 2, torch.float64, dim=6), packed_tiles(SEGMENTS)
    torch.library.opcheck(
        torch.ops.modelwright.selected_attention.default,
        (*inputs, decisions(4, 0.5), tiles.bounds_P5, tiles.bias, False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
