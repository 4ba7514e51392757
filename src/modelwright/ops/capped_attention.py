"""Attention whose scores have a soft cap, soft_cap * tanh(scores / soft_cap): Gemma 2, section 2.3.

PyTorch's attention operators for CPUs do not support it. Here the tiles of `ops/attention.py` are computed one after
the other and again in backward, so that scores exist for one tile at a time (Dao et al. 2022, "FlashAttention"). In at
least FP32. The reference is `ops.attention.masked_attention_naive`.

Legend: as in `ops/attention.py`; S queries and N keys of a tile, G query heads per key/value head.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports TorchDynamo at once, which takes 0.5 s

from modelwright.ops.attention import Tiles

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
