"""The product with a frozen weight that is stored packed: forward and backward unpack it again, some rows at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

RowBlocks = Callable[[Tensor, Tensor], Iterator[Tensor]]
"""`(codes, scales)` -> consecutive rows of the weight [O, I], together all of them."""
Product = Callable[[Tensor, Tensor], Tensor]
"""`(x [..., I], weight [O, I])` -> [..., O]."""


def packed_product(x: Tensor, codes: Tensor, scales: Tensor, row_blocks: RowBlocks, product: Product) -> Tensor:
    """Returns product(x, W), [..., O] for x [..., I]. Its gradient is the same product of the output's gradient with W
    transposed. Saves codes and scales for backward, neither x nor W. Differentiable once, in x.
    """
    return _PackedProduct.apply(x, codes, scales, row_blocks, product)  # type: ignore[return-value]


def packed_product_naive(x: Tensor, codes: Tensor, scales: Tensor, row_blocks: RowBlocks, product: Product) -> Tensor:
    """The definition, with the whole weight: the reference for `packed_product`."""
    return product(x, torch.cat(list(row_blocks(codes, scales))))


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scales, row_blocks, product):
        ctx.save_for_backward(codes, scales)
        ctx.row_blocks, ctx.product, ctx.dtype = row_blocks, product, x.dtype
        parts = [product(x, rows_RI) for rows_RI in row_blocks(codes, scales)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        dx, start = None, 0
        for rows_RI in ctx.row_blocks(*ctx.saved_tensors):
            part = ctx.product(grad[..., start : start + rows_RI.shape[0]], rows_RI.T)
            # Several parts are added up in FP32 at least.
            dx = part if dx is None else dx.to(torch.promote_types(part.dtype, torch.float32)) + part
            start += rows_RI.shape[0]
        assert dx is not None
        return dx.to(ctx.dtype), None, None, None, None
