"""This rank's shard of a tensor that may be a DTensor."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor_like(whole: Tensor, piece: Tensor) -> Tensor:
    """A DTensor placed like `whole` around this rank's shard, sharing its memory."""
    return DTensor(piece, whole._spec, requires_grad=False) if isinstance(whole, DTensor) else piece


def max_over_shards(values: Tensor, sharded: Tensor) -> Tensor:
    """The maximum over the ranks among which `sharded` is divided, in place; a plain tensor is on one rank."""
    if isinstance(sharded, DTensor):
        for axis, placement in enumerate(sharded.placements):
            if not placement.is_replicate():
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(axis))
    return values
