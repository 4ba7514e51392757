"""This rank's part of a tensor that may be a DTensor, and of a named parameter or its gradient under any layout."""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from modelwright.core.config import ConfigError, derive_seed


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor_like(whole: Tensor, piece: Tensor) -> Tensor:
    """A DTensor placed like `whole` around this rank's shard, sharing its memory."""
    return DTensor(piece, whole._spec, requires_grad=False) if isinstance(whole, DTensor) else piece


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Returns this rank's shard as slices of the whole tensor; all of it for a plain tensor."""
    shape, offset = tensor.shape, (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def max_over_shards(values: Tensor, sharded: Tensor) -> Tensor:
    """The maximum over the ranks among which `sharded` is divided, in place; a plain tensor is on one rank."""
    if isinstance(sharded, DTensor):
        for axis, placement in enumerate(sharded.placements):
            if not placement.is_replicate():
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(axis))
    return values


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """This rank's part of a named tensor."""

    name: str
    """The parameter's name in the whole model."""
    full_shape: torch.Size
    """The shape of the whole tensor."""
    tensor: Tensor
    """The part. It shares memory with the tensor that training uses: writing to it changes the run."""
    index: tuple[slice, ...]
    """Bounds of the part in the whole tensor: a slice for each dimension, or, for part of a flattened tensor, one slice
    in a tuple (`is_flat`)."""
    source: Tensor
    """The tensor of which `tensor` is this rank's part: `tensor` itself, or a DTensor."""
    is_flat: bool = False
    """True if `index` refers to the flattened tensor, and `tensor` has one dimension."""

    @property
    def is_whole(self) -> bool:
        return self.tensor.numel() == self.full_shape.numel()

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of another tensor of shape `full_shape`; a view."""
        return (whole.reshape(-1) if self.is_flat else whole)[self.index]

    def laid_out(self, values: Tensor) -> Tensor:
        """Turns values in the shape of `tensor` into a tensor that follows the parameter into a checkpoint and under
        another layout: it is saved as a whole, and `part_of` takes this rank's part of it on loading. Raises
        `ConfigError` for part of a flattened tensor, whose bounds no checkpoint knows.
        """
        if self.is_flat:
            raise ConfigError(
                f"{self.name}: this rank has a part of the flattened tensor, which a checkpoint cannot put together; "
                "let the technique declare needs = {UNDIVIDED_GRADIENTS}"
            )
        return as_dtensor_like(self.source, values)

    def positions(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """Positions of the elements in the flattened whole tensor, shaped like `tensor`. Narrow dtypes wrap around."""
        shape, device = (self.full_shape.numel(),) if self.is_flat else self.full_shape, self.tensor.device
        positions = torch.zeros((), dtype=dtype, device=device)
        for dim, part in enumerate(self.index):
            places = torch.arange(part.start, part.stop, dtype=dtype, device=device) * prod(shape[dim + 1 :])
            positions = positions.unsqueeze(-1) + places
        return positions

    def random_like(self, seed: int, step: int) -> Tensor:
        """This rank's part of standard normal noise for the whole tensor, in FP32; a function of (seed, step, name)
        alone, so that every layout adds the same noise.
        """
        # Every rank draws the noise of the whole tensor, in the time and memory that this takes, and keeps its part.
        draw = torch.Generator(self.tensor.device).manual_seed(derive_seed(seed, step, self.name))
        return self.part_of(torch.randn(self.full_shape, generator=draw, device=self.tensor.device))


def view_of(name: str, tensor: Tensor) -> TensorView:
    """The view of a whole tensor, or of this rank's shard of a DTensor."""
    part, index = local(tensor), own_part(tensor)
    return TensorView(name=name, full_shape=tensor.shape, tensor=part, index=index, source=tensor)


def flat_view_of(name: str, full_shape: torch.Size, part: Tensor, first: int) -> TensorView:
    """The view of consecutive elements of a flattened tensor, from element `first` on."""
    index = (slice(first, first + part.numel()),)
    return TensorView(name=name, full_shape=full_shape, tensor=part, index=index, source=part, is_flat=True)
