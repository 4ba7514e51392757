"""Differentiable collectives along one axis, each with its conjugate in backward.

Each name describes the forward pass; the docstring describes the gradient. A tensor that is the same on all ranks has
the same gradient on all ranks; one of which each rank holds a part has that part's gradient. Sums are computed in FP32,
whatever the dtype, and rounded once. Source: Shoeybi et al. 2019, "Megatron-LM" (`enter` and `leave` are its f and g);
Korthikanti et al. 2022 (the others).

The rows of all ranks as one tensor, with gradients: for losses that compare every row of a batch with every other.

Legend: P rows of this rank, N rows of all ranks, E width.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from modelwright.parallel.mesh import World

Move = Callable[[Tensor], Tensor]


def with_gradient(x: Tensor, there: Move, back: Move) -> Tensor:
    """Returns `there(x)`, whose gradient is `back` of the incoming gradient. Neither may work in place."""
    return _Moved.apply(x, there, back)  # type: ignore[return-value]


def enter(x: Tensor, axis: World) -> Tensor:
    """x unchanged, the same on all ranks, as input of work that is divided among ranks; gradients are summed."""
    return with_gradient(x, lambda y: y.view_as(y), lambda grad: summed(grad, axis))


def leave(x: Tensor, axis: World) -> Tensor:
    """The sum of all ranks' parts; every rank's part gets the whole gradient."""
    return with_gradient(x, lambda y: summed(y, axis), lambda grad: grad)


def gather(x: Tensor, axis: World, dim: int) -> Tensor:
    """All ranks' slices, for work that is divided among ranks; backward sums the gradients and takes this slice."""
    return with_gradient(x, lambda y: gathered(y, axis, dim), lambda grad: summed_slice(grad, axis, dim))


def reduce_scatter(x: Tensor, axis: World, dim: int) -> Tensor:
    """This rank's slice of the sum of all ranks' parts; gradients are gathered."""
    return with_gradient(x, lambda y: summed_slice(y, axis, dim), lambda grad: gathered(grad, axis, dim))


def gather_replicated(x: Tensor, axis: World, dim: int) -> Tensor:
    """All ranks' slices, for work that all ranks do identically; each keeps its slice of the gradient, unsummed."""
    return with_gradient(
        x, lambda y: gathered(y, axis, dim), lambda grad: grad.chunk(axis.size, dim)[axis.rank].contiguous()
    )


def summed(x: Tensor, axis: World) -> Tensor:
    """The sum over the ranks, the same bits everywhere."""
    return axis.all_reduce_sum(_widened(x).clone(memory_format=torch.contiguous_format)).to(x.dtype)


def gathered(x: Tensor, axis: World, dim: int) -> Tensor:
    """The ranks' tensors, of one shape, concatenated along `dim`."""
    return torch.cat(axis.all_gather(x).unbind(0), dim)


def summed_slice(x: Tensor, axis: World, dim: int) -> Tensor:
    """This rank's slice along `dim`, which must divide evenly, of the sum over the ranks."""
    parts = [part.contiguous() for part in _widened(x).chunk(axis.size, dim)]
    local = torch.empty_like(parts[0])
    dist.reduce_scatter(local, parts, group=axis.group)
    return local.to(x.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def gather_rows(x_PE: Tensor, axis: World) -> tuple[Tensor, int]:
    """Returns all ranks' rows concatenated [N, E], in rank order, and the index of this rank's first row. Ranks may
    hold different counts.

    Backward sums the gradients of all ranks and gives each rank those of its own rows. So where every rank
    differentiates its part of a sum over ranks, it gets the gradient of the whole sum.
    """
    if axis.size == 1:
        return x_PE, 0
    counts = axis.all_gather(torch.tensor(len(x_PE), device=x_PE.device)).tolist()
    first = sum(counts[: axis.rank])
    own = slice(first, first + counts[axis.rank])

    def there(own_PE: Tensor) -> Tensor:
        # An all-gather needs equal shapes.
        padded = own_PE.new_zeros(max(counts), *own_PE.shape[1:])
        padded[: len(own_PE)] = own_PE
        return torch.cat([rows[:count] for rows, count in zip(axis.all_gather(padded), counts, strict=True)])

    # The sum is in place, so it takes a copy; and the own rows another, or they would keep all of it alive.
    rows_NE = with_gradient(
        x_PE,
        there,
        lambda grad: axis.all_reduce_sum(grad.clone(memory_format=torch.contiguous_format))[own].clone(),
    )
    return rows_NE, first
