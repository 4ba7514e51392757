"""Attention with a selection of heads for each token: `packed_attention` at the open heads, zeros elsewhere.

This package's kernel gathers the open queries of each head, so that its time follows the share of open heads. Without
it each tile is one call of PyTorch's attention with the open queries of all heads, padded to the largest number in any
head; that also takes sliding windows and FP64. Rows that are not split are computed whole. The reference masks the
output of `ops.attention.masked_attention_naive`.

Legend: as in `ops/attention.py`; S queries of a tile, N of them after gathering, L keys of a tile.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelwright.ops import cpu_kernels
from modelwright.ops.attention import Tiles, whole_rows_backward, whole_rows_forward
from modelwright.ops.matmul import upcast


def selected_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, open_BTH: Tensor, tiles: Tiles) -> Tensor:
    """Computes causal attention within documents where `open_BTH` (boolean) is true, zeros elsewhere; [B, T, H, d] in
    the number format of `v_BTKd`. Closed heads get no gradient. CPU only; one opaque operator; differentiable once.
    """
    q_BTHd, k_BTKd = q_BTHd.to(v_BTKd.dtype), k_BTKd.to(v_BTKd.dtype)
    return _selected_forward(q_BTHd, k_BTKd, v_BTKd, open_BTH, tiles.bounds_P5, tiles.bias, tiles.window > 0)[0]


class _Gathered(NamedTuple):
    """The open queries of a tile. index: their numbers within the tile, [H, N]; is_open: false for padding; bias: the
    mask of the keys that they see, additive [H, N, L].
    """

    index_HN: Tensor
    is_open_HN: Tensor
    bias_HNL: Tensor

    def of(self, tile_SHd: Tensor) -> Tensor:
        """Gathers the open queries of a tile, [1, H, N, d]."""
        index_HNd = self.index_HN[..., None].expand(-1, -1, tile_SHd.shape[-1])
        return tile_SHd.transpose(0, 1).gather(1, index_HNd)[None]

    def back(self, gathered_1HNd: Tensor, like_SHd: Tensor) -> Tensor:
        """Scatters gathered values to their places in a tile [S, H, d] with zeros elsewhere."""
        values_HNd = gathered_1HNd[0].masked_fill(~self.is_open_HN[..., None], 0.0).to(like_SHd.dtype)
        whole_HSd = torch.zeros_like(like_SHd.transpose(0, 1), memory_format=torch.contiguous_format)
        index_HNd = self.index_HN[..., None].expand(-1, -1, like_SHd.shape[-1])
        return whole_HSd.scatter_(1, index_HNd, values_HNd).transpose(0, 1)


def _gathered(open_SH: Tensor, bias: Tensor, start: int, first: int, end: int) -> _Gathered | None:
    """Returns None if all heads of the tile are closed."""
    most = int(open_SH.sum(dim=0).max())
    if not most:
        return None
    # Open queries first, in their order; heads with fewer are padded with closed ones.
    index_HN = (~open_SH.T).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    height, width = bias.shape
    skip = width - height - (first - start)
    bias_SL = bias[: end - first, skip : skip + end - start]
    return _Gathered(index_HN, open_SH.T.gather(1, index_HN), bias_SL[index_HN])


def _heads(x_LKd: Tensor, num_heads: int) -> Tensor:
    """Keys or values for each query head, [1, H, L, d]."""
    return x_LKd.transpose(0, 1).repeat_interleave(num_heads // x_LKd.shape[1], dim=0)[None]


@torch.library.custom_op("modelwright::selected_attention", mutates_args=(), device_types="cpu")
def _selected_forward(
    q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, open_BTH: Tensor, bounds_P5: Tensor, bias: Tensor, has_window: bool
) -> tuple[Tensor, Tensor]:
    """The output, and the log of each softmax's denominator [B, H, T], which backward needs."""
    # A bias with 4 dimensions is the mask of whole rows.
    if bias.dim() == 4:
        out_BTHd, lse_BKGT = whole_rows_forward(q_BTHd, k_BTKd, v_BTKd, bias)
        return out_BTHd * open_BTH[..., None], lse_BKGT.flatten(1, 2)
    # The kernel cannot skip keys before a window.
    if not has_window and cpu_kernels.take_heads(q_BTHd):
        q, k, v = (x.contiguous() for x in (q_BTHd, k_BTKd, v_BTKd))
        out_BTHd, lse_BKGT = cpu_kernels.attention(q, k, v, bounds_P5, open_BTH.contiguous())
        return out_BTHd, lse_BKGT.flatten(1, 2)
    out_BTHd, lse_BHT = _results(q_BTHd)
    q, k, v = upcast(q_BTHd, k_BTKd, v_BTKd)
    bias = bias.to(q.dtype)
    for row, start, first, end, at in bounds_P5.tolist():
        queries, keys = slice(at, at + end - first), slice(start, end)
        tile = _gathered(open_BTH[row, queries], bias, start, first, end)
        if tile is None:
            continue
        out_1HNd, lse_1HN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            tile.of(q[row, queries]), *(_heads(x[row, keys], q.shape[2]) for x in (k, v)), attn_mask=tile.bias_HNL[None]
        )
        out_BTHd[row, queries] = tile.back(out_1HNd, out_BTHd[row, queries])
        lse_BHT[row, :, queries].scatter_(1, tile.index_HN, lse_1HN[0])
    return out_BTHd, lse_BHT


def _results(q_BTHd: Tensor) -> tuple[Tensor, Tensor]:
    rows, row_len, num_heads, _ = q_BTHd.shape
    wide = torch.promote_types(q_BTHd.dtype, torch.float32)
    out_BTHd = torch.zeros_like(q_BTHd, memory_format=torch.contiguous_format)
    return out_BTHd, q_BTHd.new_zeros((rows, num_heads, row_len), dtype=wide)


_selected_forward.register_fake(lambda q_BTHd, *_: _results(q_BTHd))


@torch.library.custom_op("modelwright::selected_attention_backward", mutates_args=(), device_types="cpu")
def _selected_backward(
    grad_BTHd: Tensor,
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    open_BTH: Tensor,
    bounds_P5: Tensor,
    bias: Tensor,
    out_BTHd: Tensor,
    lse_BHT: Tensor,
    has_window: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_kv_heads = q_BTHd.shape[2], k_BTKd.shape[2]
    if bias.dim() == 4:
        grad_BTHd = grad_BTHd * open_BTH[..., None]
        lse_BKGT = lse_BHT.unflatten(1, (num_kv_heads, -1))
        return whole_rows_backward(grad_BTHd, q_BTHd, k_BTKd, v_BTKd, out_BTHd, lse_BKGT, bias)
    if not has_window and cpu_kernels.take_heads(q_BTHd):
        grad, q, k, v, out, lse = (x.contiguous() for x in (grad_BTHd, q_BTHd, k_BTKd, v_BTKd, out_BTHd, lse_BHT))
        return cpu_kernels.attention_backward(grad, q, k, v, out, lse, bounds_P5, open_BTH.contiguous())
    q, k, v, grad, out = upcast(q_BTHd, k_BTKd, v_BTKd, grad_BTHd, out_BTHd)
    grad_q, grad_k, grad_v = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_BTHd, k_BTKd, v_BTKd)
    )
    bias = bias.to(q.dtype)
    for row, start, first, end, at in bounds_P5.tolist():
        queries, keys = slice(at, at + end - first), slice(start, end)
        tile = _gathered(open_BTH[row, queries], bias, start, first, end)
        if tile is None:
            continue
        tile_q, tile_k, tile_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            tile.of(grad[row, queries]) * tile.is_open_HN[None, ..., None],
            tile.of(q[row, queries]),
            *(_heads(x[row, keys], num_heads) for x in (k, v)),
            tile.of(out[row, queries]),
            lse_BHT[row, :, queries].gather(1, tile.index_HN)[None],
            0.0,
            False,
            attn_mask=tile.bias_HNL[None],
        )
        grad_q[row, queries] = tile.back(tile_q, grad_q[row, queries])
        for whole, part_1HLd in ((grad_k, tile_k), (grad_v, tile_v)):
            whole[row, keys] += part_1HLd[0].unflatten(0, (num_kv_heads, -1)).sum(1).transpose(0, 1)
    return grad_q, grad_k, grad_v


_selected_backward.register_fake(
    lambda _, q, k, v, *rest: tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.has_window = inputs
    # The denominators are an output only because backward needs them.
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


torch.library.register_autograd(
    "modelwright::selected_attention",
    lambda ctx, grad_BTHd, _: (*_selected_backward(grad_BTHd, *ctx.saved_tensors, ctx.has_window), *[None] * 4),
    setup_context=_keep_for_backward,
)
