"""Attention of queries to some of their keys, and how such parts are combined: the arithmetic of ring attention.

A softmax over all keys is a weighted sum of softmaxes over disjoint sets of keys; the weights follow from the logarithm
of each softmax's denominator (log-sum-exp), so that keys can be visited one block after another. Sources: Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax"; Liu et al. 2023, "Ring Attention with Blockwise
Transformers". `parallel/context_parallel.py` passes the keys from rank to rank.

Legend: B rows, S queries, N keys, H query heads, K key/value heads, d head width, G = H / K. Query head h reads
key/value head h // G.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from modelwright.ops.matmul import upcast

Span = tuple[int, int]
"""`(start, end)` of consecutive tokens of a row."""


class VisibleBlock(NamedTuple):
    """Queries and keys of one row that see each other: all of them, or, on the diagonal, each query the keys up to its
    own position. All four bounds are positions in the tensors of queries and keys, which may hold only some of the
    row's tokens.
    """

    row: int
    query_start: int
    query_end: int
    key_start: int
    key_end: int
    is_diagonal: bool


@dataclass(frozen=True)
class Blocks:
    """The keys of one rank that the queries of another see, as a list of blocks, for a CPU."""

    blocks: Sequence[VisibleBlock]


@dataclass(frozen=True)
class Mask:
    """The keys that queries see as a boolean mask [B, S, N], true where a query sees a key: for any device."""

    visible_BSN: Tensor


Visible = Blocks | Mask


def visible_blocks(segments_BT: Tensor, query_spans: Sequence[Span], key_spans: Sequence[Span]) -> Blocks:
    """Finds the keys at `key_spans` that the queries at `query_spans` see: earlier tokens of their own document, and
    themselves. segments_BT: the document of each token of the whole rows, on the CPU. Two spans are equal or do not
    overlap. A tensor of queries or keys holds the spans concatenated.
    """
    blocks: list[VisibleBlock] = []
    for row, segments_T in enumerate(segments_BT):
        start = 0
        for length in torch.unique_consecutive(segments_T, return_counts=True)[1].tolist():
            document = (start, start + length)
            for query, query_place in _within(document, query_spans):
                for key, key_place in _within(document, key_spans):
                    if key[0] <= query[0]:
                        ends = query_place + query[1] - query[0], key_place + key[1] - key[0]
                        blocks.append(VisibleBlock(row, query_place, ends[0], key_place, ends[1], key == query))
            start += length
    return Blocks(blocks)


def _within(document: Span, spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yields the part of each span within the document, and its position in the tensor of all spans."""
    offset = 0
    for start, end in spans:
        first, last = max(start, document[0]), min(end, document[1])
        if first < last:
            yield (first, last), offset + first - start
        offset += end - start


def visible_mask(segments_BT: Tensor, query_spans: Sequence[Span], key_spans: Sequence[Span]) -> Mask:
    """`visible_blocks` as a mask, on the device of `segments_BT`."""
    query_S, key_N = (
        torch.cat([torch.arange(start, end, device=segments_BT.device) for start, end in spans])
        for spans in (query_spans, key_spans)
    )
    same_BSN = segments_BT[:, query_S, None] == segments_BT[:, None, key_N]
    return Mask(same_BSN & (query_S[:, None] >= key_N))


def empty_output(q_BSHd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output [B, S, H, d] and log-sum-exp [B, S, H] of attention to no keys, in FP32 at least."""
    dtype = torch.promote_types(q_BSHd.dtype, torch.float32)
    return q_BSHd.new_zeros(q_BSHd.shape, dtype=dtype), q_BSHd.new_full(q_BSHd.shape[:3], -math.inf, dtype=dtype)


def add_keys(
    out_BSHd: Tensor, lse_BSH: Tensor, q_BSHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, visible: Visible
) -> None:
    """Accumulates attention to further keys: `out_BSHd` and `lse_BSH` are changed in place. Keys of which every query
    sees at least one must come first.
    """
    q_BSHd, k_BNKd, v_BNKd = upcast(q_BSHd, k_BNKd, v_BNKd)
    if isinstance(visible, Mask):
        scores_BKGSN = _scores(q_BSHd, k_BNKd, visible.visible_BSN)
        lse_BKGS = scores_BKGSN.logsumexp(-1)
        # A query that sees none of the keys has minus infinity everywhere: its output must be 0, not nan.
        weights_BKGSN = (scores_BKGSN - lse_BKGS.clamp(min=torch.finfo(lse_BKGS.dtype).min).unsqueeze(-1)).exp()
        part_BSKGd = torch.einsum("bkgsn,bnkd->bskgd", weights_BKGSN.to(v_BNKd.dtype), v_BNKd)
        _merge(out_BSHd, lse_BSH, part_BSKGd.flatten(2, 3), lse_BKGS.permute(0, 3, 1, 2).flatten(2, 3))
        return
    for block in visible.blocks:
        query, key = _places(block)
        part_HSd, part_lse_HS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads(q_BSHd[query]), *_repeated(q_BSHd, k_BNKd[key], v_BNKd[key]), is_causal=block.is_diagonal
        )
        _merge(out_BSHd[query], lse_BSH[query], part_HSd[0].transpose(0, 1), part_lse_HS[0].transpose(0, 1))


def gradients_of_keys(
    grad_BSHd: Tensor,
    out_BSHd: Tensor,
    lse_BSH: Tensor,
    q_BSHd: Tensor,
    k_BNKd: Tensor,
    v_BNKd: Tensor,
    visible: Visible,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the contribution of some keys to the gradients of the queries [B, S, H, d], and the gradients of these
    keys and values from these queries [B, N, K, d], in at least FP32. out_BSHd, lse_BSH: of the whole softmax, after
    all keys were added.
    """
    dtype = lse_BSH.dtype
    grad_BSHd, out_BSHd, q_BSHd, k_BNKd, v_BNKd = upcast(grad_BSHd, out_BSHd, q_BSHd, k_BNKd, v_BNKd)
    if isinstance(visible, Mask):
        return _masked_backward(grad_BSHd, out_BSHd, lse_BSH, q_BSHd, k_BNKd, v_BNKd, visible.visible_BSN)
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=dtype) for x in (q_BSHd, k_BNKd, v_BNKd))
    for block in visible.blocks:
        query, key = _places(block)
        part_q, part_k, part_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads(grad_BSHd[query]),
            _heads(q_BSHd[query]),
            *_repeated(q_BSHd, k_BNKd[key], v_BNKd[key]),
            _heads(out_BSHd[query]),
            lse_BSH[query].transpose(0, 1).unsqueeze(0),
            0.0,
            block.is_diagonal,
        )
        grad_q[query] += part_q[0].transpose(0, 1)
        for total, part in ((grad_k, part_k), (grad_v, part_v)):
            total[key] += part[0].unflatten(0, (total.shape[2], -1)).sum(1, dtype=dtype).transpose(0, 1)
    return grad_q, grad_k, grad_v


def _places(block: VisibleBlock) -> tuple[tuple[int, slice], tuple[int, slice]]:
    return (block.row, slice(block.query_start, block.query_end)), (block.row, slice(block.key_start, block.key_end))


def _heads(x_SHd: Tensor) -> Tensor:
    return x_SHd.transpose(0, 1).unsqueeze(0)


def _repeated(q_BSHd: Tensor, *keys_and_values_NKd: Tensor) -> list[Tensor]:
    """[1, H, N, d]: each key/value head once for every query head that reads it."""
    num_heads = q_BSHd.shape[2]
    return [_heads(x.repeat_interleave(num_heads // x.shape[1], dim=1)) for x in keys_and_values_NKd]


def _merge(out_xHd: Tensor, lse_xH: Tensor, part_xHd: Tensor, part_lse_xH: Tensor) -> None:
    """Combines with a softmax over further keys, in place."""
    # Each part's weight is its share of the joint denominator, exp(lse - lse of both).
    lse_after_xH = torch.logaddexp(lse_xH, part_lse_xH.to(lse_xH.dtype))
    out_xHd *= (lse_xH - lse_after_xH).exp().unsqueeze(-1)
    out_xHd += part_xHd * (part_lse_xH - lse_after_xH).exp().unsqueeze(-1)
    lse_xH.copy_(lse_after_xH)


def _scores(q_BSHd: Tensor, k_BNKd: Tensor, visible_BSN: Tensor) -> Tensor:
    """[B, K, G, S, N] in at least FP32; minus infinity where a query does not see a key."""
    wide = torch.promote_types(q_BSHd.dtype, torch.float32)
    q_BSKGd = q_BSHd.to(wide).unflatten(2, (k_BNKd.shape[2], -1))
    scores_BKGSN = torch.einsum("bskgd,bnkd->bkgsn", q_BSKGd, k_BNKd.to(wide)) * q_BSHd.shape[-1] ** -0.5
    return scores_BKGSN.masked_fill(~visible_BSN[:, None, None], -math.inf)


def _masked_backward(
    grad_BSHd: Tensor,
    out_BSHd: Tensor,
    lse_BSH: Tensor,
    q_BSHd: Tensor,
    k_BNKd: Tensor,
    v_BNKd: Tensor,
    visible_BSN: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads, wide = k_BNKd.shape[2], lse_BSH.dtype
    grad_BSKGd, out_BSKGd, q_BSKGd, lse_BSKG = (
        x.to(wide).unflatten(2, (num_kv_heads, -1)) for x in (grad_BSHd, out_BSHd, q_BSHd, lse_BSH)
    )
    k_BNKd, v_BNKd, scale = k_BNKd.to(wide), v_BNKd.to(wide), q_BSHd.shape[-1] ** -0.5
    weights_BKGSN = (_scores(q_BSHd, k_BNKd, visible_BSN) - lse_BSKG.permute(0, 2, 3, 1).unsqueeze(-1)).exp()
    grad_v = torch.einsum("bkgsn,bskgd->bnkd", weights_BKGSN, grad_BSKGd)
    # dS = P (dP - sum over keys of P dP); that sum is dO . O, so no other block of keys is needed for it.
    weighted_BKGS = (grad_BSKGd * out_BSKGd).sum(-1).permute(0, 2, 3, 1)
    grad_weights_BKGSN = torch.einsum("bskgd,bnkd->bkgsn", grad_BSKGd, v_BNKd)
    grad_scores_BKGSN = weights_BKGSN * (grad_weights_BKGSN - weighted_BKGS.unsqueeze(-1)) * scale
    grad_q = torch.einsum("bkgsn,bnkd->bskgd", grad_scores_BKGSN, k_BNKd).flatten(2, 3)
    grad_k = torch.einsum("bkgsn,bskgd->bnkd", grad_scores_BKGSN, q_BSKGd)
    return grad_q, grad_k, grad_v
