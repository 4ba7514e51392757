"""Softmax attention over whole rows: the fast paths and their naive reference.

Packed rows hold several documents, and a token sees its own document only. On a CPU most of a full T x T product would
be masked away, so `packed_attention` splits every document into tiles of queries and gives each tile only its visible
keys. This package's own kernels take all tiles at once (`cpu_kernels`); otherwise each tile is one call of PyTorch's
attention, and rows so short that calls cost more than masked products are not split. With a sliding window of W tokens
a tile has only the keys that some of its queries see, under a mask.

No kernel computes scores with a soft cap, soft_cap * tanh(scores / soft_cap) (Gemma 2, section 2.3): `capped_attention`
computes tiles one after the other, and again in backward, so that scores exist for one tile at a time (Dao et al. 2022,
"FlashAttention"), in at least FP32.

Legend: B rows, T tokens, H query heads, K key/value heads, d head width, G = H / K query heads per key/value head, S
queries and N keys of a tile. Query head h reads key/value head h // G.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports TorchDynamo at once, which takes 0.5 s

from modelwright.ops import cpu_kernels
from modelwright.ops.matmul import upcast

TILE_LEN = 128
"""Queries per tile. The CPU kernel walks keys in blocks of 512 and skips none within a block (its `kvSplitSize`)."""
TILE_COST = 6_000
"""Overhead of a tile's calls, forward and backward, in entries of the scores of all heads. On two AVX2 cores, with
widths of 128 and 384, it is 0.3 ms, where an entry takes 30 to 100 ns."""
MOST_WHOLE = 512
"""Longest row that is not split: its mask is kept for backward, at most 2 KiB a token, once for all layers."""


def document_mask(segments_BT: Tensor, window: int = 0) -> Tensor:
    """Boolean [B, 1, T, T]: true where query i sees key j <= i of its segment; with a window only if i - j < window."""
    # A token always sees itself, padding too, so no row of the softmax is empty.
    same_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]).tril()
    return (same_BTT.triu(1 - window) if window else same_BTT).unsqueeze(1)


def causal_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, window: int = 0) -> Tensor:
    """Causal attention over whole rows, [B, T, H, d]; with a window, to the last `window` tokens, itself included."""
    if 0 < window < q_BTHd.shape[1]:
        return masked_attention(q_BTHd, k_BTKd, v_BTKd, causal_mask(q_BTHd.shape[1], window, q_BTHd.device))
    out_BHTd = F.scaled_dot_product_attention(
        q_BTHd.transpose(1, 2), k_BTKd.transpose(1, 2), v_BTKd.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out_BHTd.transpose(1, 2)


def causal_mask(row_len: int, window: int, device: torch.device) -> Tensor:
    """`document_mask` of one whole document, [1, 1, T, T]."""
    return document_mask(torch.zeros(1, row_len, dtype=torch.int64, device=device), window)


def masked_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask_B1TT: Tensor) -> Tensor:
    """Attention under a boolean mask (true = visible), [B, T, H, d]."""
    out_BHTd = F.scaled_dot_product_attention(
        q_BTHd.transpose(1, 2), k_BTKd.transpose(1, 2), v_BTKd.transpose(1, 2), attn_mask=mask_B1TT, enable_gqa=True
    )
    return out_BHTd.transpose(1, 2)


def masked_attention_naive(
    q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask_B1TT: Tensor, *, soft_cap: float = 0.0
) -> Tensor:
    """The definition, step by step: the reference for `masked_attention`, `packed_attention` and
    `capped_attention`. soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    """
    group = q_BTHd.shape[2] // k_BTKd.shape[2]
    k_BTHd, v_BTHd = (x.repeat_interleave(group, dim=2) for x in (k_BTKd, v_BTKd))
    scores_BHTT = torch.einsum("bthd,bshd->bhts", q_BTHd, k_BTHd) / q_BTHd.shape[-1] ** 0.5
    if soft_cap:
        scores_BHTT = soft_cap * (scores_BHTT / soft_cap).tanh()
    weights_BHTT = scores_BHTT.masked_fill(~mask_B1TT, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights_BHTT, v_BTHd)


@dataclass(frozen=True)
class Tiles:
    """Tiles of packed rows for `packed_attention`.

    bounds_P5: int64, one tile per line: row, first key, first query and end (of queries and keys), all counted within
    the row; and the position of the first query in the tensor of queries, which may hold only some of the row's tokens.
    bias: [tile_len, most keys of any tile, rounded up], additive causal mask aligned at its lower right corner. For
    rows that are not split there are no tiles, and bias is the additive mask of whole rows, [B, 1, T, T]. window:
    tokens that a query sees, the present one included; 0 is all of its document up to itself.
    """

    bounds_P5: Tensor
    bias: Tensor
    window: int = 0


def packed_cuts(segments_BT: Tensor, window: int = 0) -> Tiles:
    """`packed_tiles`, or no tiles for short rows where a mask is expected to be faster. CPU tensors only."""
    tiles, (num_rows, row_len) = packed_tiles(segments_BT, window=window), segments_BT.shape
    # This package's kernels take all tiles in one call, so tiles cost no calls there.
    if tiles.window or "attention" in cpu_kernels.used():
        return tiles
    _, start_P, first_P, end_P, _ = tiles.bounds_P5.unbind(1)
    scores = int(((end_P - first_P) * (end_P - start_P)).sum())
    if row_len > MOST_WHOLE or num_rows * row_len**2 > scores + TILE_COST * len(tiles.bounds_P5):
        return tiles
    return whole_rows(segments_BT)


def whole_rows(segments_BT: Tensor) -> Tiles:
    """`Tiles` of rows that are not split: documents are separated by a mask."""
    mask_B1TT = document_mask(segments_BT)
    bias_B1TT = torch.zeros(mask_B1TT.shape).masked_fill_(~mask_B1TT, float("-inf"))
    return Tiles(torch.empty(0, 5, dtype=torch.int64), bias_B1TT)


def packed_tiles(
    segments_BT: Tensor, tile_len: int = TILE_LEN, *, spans: Sequence[tuple[int, int]] | None = None, window: int = 0
) -> Tiles:
    """Splits every run of equal segment numbers into tiles of at most `tile_len` queries. CPU tensors only. spans:
    `(start, end)` of the tokens whose queries are computed, concatenated in the tensor of queries; the whole row by
    default. window: see `Tiles`; one that no document exceeds counts as 0.
    """
    lengths = [torch.unique_consecutive(segments_T, return_counts=True)[1].tolist() for segments_T in segments_BT]
    window = window if window < max(map(max, lengths), default=0) else 0
    # A document's first tile is causal, without a mask for the window: it must not be longer than that.
    tile_len = min(tile_len, window) if window else tile_len
    bounds: list[tuple[int, int, int, int, int]] = []
    spans = [(0, segments_BT.shape[1])] if spans is None else spans
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            end, before = start + length, 0
            for span_start, span_end in spans:
                last = min(end, span_end)
                for first in range(max(start, span_start), last, tile_len):
                    first_key = max(start, first - window + 1) if window else start
                    bounds.append((row, first_key, first, min(first + tile_len, last), before + first - span_start))
                before += span_end - span_start
            start = end
    reach = max((first - start for _, start, first, _, _ in bounds), default=0)
    width = (math.ceil(reach / tile_len) + 1) * tile_len
    bias = torch.full((tile_len, width), float("-inf")).triu(width - tile_len + 1)
    if window:
        bias += torch.full((tile_len, width), float("-inf")).tril(width - tile_len - window)
    return Tiles(torch.tensor(bounds, dtype=torch.int64).view(-1, 5), bias, window)


def packed_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, tiles: Tiles) -> Tensor:
    """Computes causal attention within documents, [B, T, H, d], in the number format of `v_BTKd`. CPU only.

    Equals `masked_attention` under `document_mask`, at the queries of the tiles. One opaque operator to
    `torch.compile`; differentiable once.
    """
    q_BTHd, k_BTKd = q_BTHd.to(v_BTKd.dtype), k_BTKd.to(v_BTKd.dtype)
    return _packed_forward(q_BTHd, k_BTKd, v_BTKd, tiles.bounds_P5, tiles.bias, tiles.window > 0)[0]


@torch.library.custom_op("modelwright::packed_attention", mutates_args=(), device_types="cpu")
def _packed_forward(
    q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, bounds_P5: Tensor, bias: Tensor, has_window: bool
) -> tuple[Tensor, Tensor]:
    """The output [B, T, H, d] and the log of each softmax's denominator [B, K, G, T], which backward needs. has_window:
    tiles start behind the beginning of their document, which this package's kernels do not support.
    """
    # A bias with 4 dimensions is the mask of whole rows.
    if bias.dim() == 4:
        return whole_rows_forward(q_BTHd, k_BTKd, v_BTKd, bias)
    if not has_window and cpu_kernels.take_heads(q_BTHd):
        return cpu_kernels.attention(q_BTHd.contiguous(), k_BTKd.contiguous(), v_BTKd.contiguous(), bounds_P5)
    out_BTHd, lse_BKGT = _results(q_BTHd, k_BTKd)
    q_BKGTd, k_BKGTd, v_BKGTd = _grouped(*upcast(q_BTHd, k_BTKd, v_BTKd))
    out_BKGTd = out_BTHd.unflatten(2, (k_BTKd.shape[2], -1)).permute(0, 2, 3, 1, 4)
    bias = bias.to(q_BKGTd.dtype)
    for row, start, first, end, at in bounds_P5.tolist():
        tile = (row, slice(None), slice(None), slice(at, at + end - first))
        out_BKGTd[tile], lse_BKGT[tile] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BKGTd[tile],
            k_BKGTd[row, :, :, start:end],
            v_BKGTd[row, :, :, start:end],
            is_causal=first == start,
            attn_mask=_tile_bias(bias, start, first, end),
        )
    return out_BTHd, lse_BKGT


def _results(q_BTHd: Tensor, k_BTKd: Tensor) -> tuple[Tensor, Tensor]:
    rows, row_len, num_heads, _ = q_BTHd.shape
    lse_shape = (rows, k_BTKd.shape[2], num_heads // k_BTKd.shape[2], row_len)
    # The kernel keeps the denominators in FP32 at least.
    lse_BKGT = q_BTHd.new_empty(lse_shape, dtype=torch.promote_types(q_BTHd.dtype, torch.float32))
    return torch.empty_like(q_BTHd, memory_format=torch.contiguous_format), lse_BKGT


_packed_forward.register_fake(lambda q_BTHd, k_BTKd, *_: _results(q_BTHd, k_BTKd))


@torch.library.custom_op("modelwright::packed_attention_backward", mutates_args=(), device_types="cpu")
def _packed_backward(
    grad_BTHd: Tensor,
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    out_BTHd: Tensor,
    lse_BKGT: Tensor,
    bounds_P5: Tensor,
    bias: Tensor,
    has_window: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if bias.dim() == 4:
        return whole_rows_backward(grad_BTHd, q_BTHd, k_BTKd, v_BTKd, out_BTHd, lse_BKGT, bias)
    if not has_window and cpu_kernels.take_heads(q_BTHd):
        q, k, v = q_BTHd.contiguous(), k_BTKd.contiguous(), v_BTKd.contiguous()
        return cpu_kernels.attention_backward(grad_BTHd.contiguous(), q, k, v, out_BTHd, lse_BKGT, bounds_P5)
    num_kv_heads = k_BTKd.shape[2]
    q_BKGTd, k_BKGTd, v_BKGTd = _grouped(*upcast(q_BTHd, k_BTKd, v_BTKd))
    grad_q = torch.empty_like(q_BTHd, memory_format=torch.contiguous_format)
    grad_k, grad_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k_BTKd, v_BTKd))
    grad_BKGTd, out_BKGTd, grad_q_BKGTd = (
        x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4) for x in (*upcast(grad_BTHd, out_BTHd), grad_q)
    )
    bias = bias.to(q_BKGTd.dtype)
    for row, start, first, end, at in bounds_P5.tolist():
        tile = (row, slice(None), slice(None), slice(at, at + end - first))
        tile_q, tile_k, tile_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BKGTd[tile],
            q_BKGTd[tile],
            k_BKGTd[row, :, :, start:end],
            v_BKGTd[row, :, :, start:end],
            out_BKGTd[tile],
            lse_BKGT[tile],
            0.0,
            first == start,
            attn_mask=_tile_bias(bias, start, first, end),
        )
        grad_q_BKGTd[tile] = tile_q
        # Each tile of a document adds to its keys, over all query heads that read them.
        grad_k[row, start:end] += tile_k.sum(1).transpose(0, 1)
        grad_v[row, start:end] += tile_v.sum(1).transpose(0, 1)
    return grad_q, grad_k, grad_v


_packed_backward.register_fake(
    lambda _, q, k, v, *rest: tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
)


def _keep_for_backward(ctx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BTHd, k_BTKd, v_BTKd, bounds_P5, bias, ctx.has_window = inputs
    # The denominators are an output only because backward needs them.
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q_BTHd, k_BTKd, v_BTKd, *output, bounds_P5, bias)


torch.library.register_autograd(
    "modelwright::packed_attention",
    lambda ctx, grad_BTHd, _: (*_packed_backward(grad_BTHd, *ctx.saved_tensors, ctx.has_window), None, None, None),
    setup_context=_keep_for_backward,
)


def whole_rows_forward(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, bias_B1TT: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of all rows in one call under the mask of `whole_rows`: the output and the logs of the denominators."""
    q_BHTd, k_BHTd, v_BHTd = _whole_heads(*upcast(q_BTHd, k_BTKd, v_BTKd))
    out_BHTd, lse_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHTd, k_BHTd, v_BHTd, attn_mask=bias_B1TT.to(q_BHTd.dtype)
    )
    out_BTHd = out_BHTd.transpose(1, 2).to(q_BTHd.dtype).contiguous()
    return out_BTHd, lse_BHT.unflatten(1, (k_BTKd.shape[2], -1)).contiguous()


def whole_rows_backward(
    grad_BTHd: Tensor,
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    out_BTHd: Tensor,
    lse_BKGT: Tensor,
    bias_B1TT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of `whole_rows_forward`."""
    q_BHTd, k_BHTd, v_BHTd = _whole_heads(*upcast(q_BTHd, k_BTKd, v_BTKd))
    grad_BHTd, out_BHTd = (x.transpose(1, 2) for x in upcast(grad_BTHd, out_BTHd))
    grads_BHTd = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BHTd, q_BHTd, k_BHTd, v_BHTd, out_BHTd, lse_BKGT.flatten(1, 2), 0.0, False,
        attn_mask=bias_B1TT.to(q_BHTd.dtype),
    )  # fmt: skip
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads_BHTd)
    grad_k, grad_v = (x.unflatten(2, (k_BTKd.shape[2], -1)).sum(3) for x in (grad_k, grad_v))
    result = zip((grad_q, grad_k, grad_v), (q_BTHd, k_BTKd, v_BTKd), strict=True)
    grad_q, grad_k, grad_v = (grad.to(x.dtype).contiguous() for grad, x in result)
    return grad_q, grad_k, grad_v


def _whole_heads(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, T, d] each; keys and values are copied for the heads that share them."""
    _, k_BKGTd, v_BKGTd = _grouped(q_BTHd, k_BTKd, v_BTKd)
    return q_BTHd.transpose(1, 2), k_BKGTd.flatten(1, 2), v_BKGTd.flatten(1, 2)


def _grouped(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, K, G, T, d]; keys and values repeat over G with stride 0 instead of being copied."""
    num_kv_heads = k_BTKd.shape[2]
    q_BKGTd = q_BTHd.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    group = q_BKGTd.shape[2]
    k_BKGTd, v_BKGTd = (x.transpose(1, 2).unsqueeze(2).expand(-1, -1, group, -1, -1) for x in (k_BTKd, v_BTKd))
    return q_BKGTd, k_BKGTd, v_BKGTd


def _tile_bias(bias: Tensor, start: int, first: int, end: int) -> Tensor | None:
    """The causal bias of queries first..end over keys start..end; a document's first tile is simply causal."""
    if first == start:
        return None
    # The bias is aligned at its lower right corner: leave out the keys that precede the document.
    height, width = bias.shape
    skip = width - height - (first - start)
    return bias[: end - first, skip : skip + end - start]


Tile = tuple[int, slice, slice, Tensor]
"""Row, places of the queries, places of the keys, mask [S, N] of the keys that queries see."""


@_disable_dynamo
def capped_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, tiles: Tiles, soft_cap: float) -> Tensor:
    """`packed_attention` with a soft cap, [B, T, H, d] in the format of `v_BTKd`. Differentiable once."""
    if tiles.bias.dim() == 4:  # whole rows
        return masked_capped_attention(q_BTHd, k_BTKd, v_BTKd, tiles.bias == 0, soft_cap)
    return _CappedAttention.apply(q_BTHd, k_BTKd, v_BTKd, tiles, soft_cap).to(v_BTKd.dtype)  # type: ignore


def masked_capped_attention(
    q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask_B1TT: Tensor, soft_cap: float
) -> Tensor:
    """Capped attention under a boolean mask, all scores at once: for short rows, caches and devices without tiles."""
    # Factors are contiguous: for others PyTorch chooses the kernel by the number of rows, so that a row's last bits
    # would depend on its neighbors.
    wide, group = torch.promote_types(v_BTKd.dtype, torch.float32), q_BTHd.shape[2] // k_BTKd.shape[2]
    q_BHTd = q_BTHd.to(wide).transpose(1, 2).contiguous()
    k_BHTd, v_BHTd = (x.to(wide).repeat_interleave(group, dim=2).transpose(1, 2).contiguous() for x in (k_BTKd, v_BTKd))
    scores_BHTT = q_BHTd @ k_BHTd.transpose(2, 3) * q_BHTd.shape[-1] ** -0.5
    capped_BHTT = (soft_cap * (scores_BHTT / soft_cap).tanh()).masked_fill(~mask_B1TT, float("-inf"))
    return (capped_BHTT.softmax(dim=-1) @ v_BHTd).transpose(1, 2).to(v_BTKd.dtype)


class _CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, tiles: Tiles, soft_cap: float) -> Tensor:
        ctx.formats = q_BTHd.dtype, k_BTKd.dtype, v_BTKd.dtype
        wide = torch.promote_types(v_BTKd.dtype, torch.float32)
        q_BTKGd = q_BTHd.to(wide).unflatten(2, (k_BTKd.shape[2], -1))
        k_BTKd, v_BTKd = k_BTKd.to(wide), v_BTKd.to(wide)
        out_BTKGd = torch.zeros_like(q_BTKGd, memory_format=torch.contiguous_format)
        lse_BTKG = q_BTKGd.new_zeros(q_BTKGd.shape[:-1])
        for row, queries, keys, visible_SN in _tiles(tiles, q_BTKGd.device):
            capped_KGSN = _capped(q_BTKGd[row, queries], k_BTKd[row, keys], soft_cap)
            capped_KGSN = capped_KGSN.masked_fill(~visible_SN, float("-inf"))
            lse_KGS = capped_KGSN.logsumexp(-1)
            weights_KGSN = (capped_KGSN - lse_KGS.unsqueeze(-1)).exp()
            out_BTKGd[row, queries] = torch.einsum("kgsn,nkd->skgd", weights_KGSN, v_BTKd[row, keys])
            lse_BTKG[row, queries] = lse_KGS.permute(2, 0, 1)
        ctx.save_for_backward(q_BTKGd, k_BTKd, v_BTKd, out_BTKGd, lse_BTKG, tiles.bounds_P5, tiles.bias)
        ctx.window, ctx.soft_cap = tiles.window, soft_cap
        return out_BTKGd.flatten(2, 3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BTHd: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BTKGd, k_BTKd, v_BTKd, out_BTKGd, lse_BTKG, bounds_P5, bias = ctx.saved_tensors
        grad_BTKGd = grad_BTHd.unflatten(2, out_BTKGd.shape[2:4])
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q_BTKGd, k_BTKd, v_BTKd))
        scale = q_BTKGd.shape[-1] ** -0.5
        for row, queries, keys, visible_SN in _tiles(Tiles(bounds_P5, bias, ctx.window), q_BTKGd.device):
            grad_SKGd, q_SKGd, k_NKd = grad_BTKGd[row, queries], q_BTKGd[row, queries], k_BTKd[row, keys]
            capped_KGSN = _capped(q_SKGd, k_NKd, ctx.soft_cap)
            lse_KGS1 = lse_BTKG[row, queries].permute(1, 2, 0).unsqueeze(-1)
            weights_KGSN = (capped_KGSN - lse_KGS1).exp().masked_fill(~visible_SN, 0.0)
            grad_v[row, keys] += torch.einsum("kgsn,skgd->nkd", weights_KGSN, grad_SKGd)
            grad_weights_KGSN = torch.einsum("skgd,nkd->kgsn", grad_SKGd, v_BTKd[row, keys])
            weighted_KGS = (grad_SKGd * out_BTKGd[row, queries]).sum(-1).permute(1, 2, 0)
            # d tanh(x) = 1 - tanh(x)^2
            slope_KGSN = 1 - (capped_KGSN / ctx.soft_cap).square()
            grad_scores_KGSN = weights_KGSN * (grad_weights_KGSN - weighted_KGS.unsqueeze(-1)) * slope_KGSN * scale
            grad_q[row, queries] = torch.einsum("kgsn,nkd->skgd", grad_scores_KGSN, k_NKd)
            grad_k[row, keys] += torch.einsum("kgsn,skgd->nkd", grad_scores_KGSN, q_SKGd)
        of_q, of_k, of_v = ctx.formats
        return grad_q.flatten(2, 3).to(of_q), grad_k.to(of_k), grad_v.to(of_v), None, None


def _capped(q_SKGd: Tensor, k_NKd: Tensor, soft_cap: float) -> Tensor:
    scores_KGSN = torch.einsum("skgd,nkd->kgsn", q_SKGd, k_NKd) * q_SKGd.shape[-1] ** -0.5
    return soft_cap * (scores_KGSN / soft_cap).tanh()


def _tiles(tiles: Tiles, device: torch.device) -> Iterator[Tile]:
    for row, start, first, end, at in tiles.bounds_P5.tolist():
        distance_SN = torch.arange(first, end, device=device)[:, None] - torch.arange(start, end, device=device)
        visible_SN = distance_SN >= 0
        if tiles.window:
            visible_SN &= distance_SN < tiles.window
        yield row, slice(at, at + end - first), slice(start, end), visible_SN
