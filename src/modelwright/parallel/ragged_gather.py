"""The rows of all ranks as one tensor, with gradients: for losses that compare every row of a batch with every other.

Legend: P rows of this rank, N rows of all ranks, E width.
"""

import torch
from torch import Tensor

from modelwright.parallel.mesh import World
from modelwright.parallel.tp_collectives import with_gradient


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
