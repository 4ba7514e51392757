"""Norm of the gradients of a model laid out over a mesh, and consistency of replicated gradients.

A gradient is a plain tensor, equal on all ranks of the mesh that hold its parameter, or a DTensor of which each rank
holds a shard.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from modelwright.ops.dtensor import local
from modelwright.parallel.mesh import Mesh, World

_PIECE = 2**16
"""Elements that the CPU adds up in one go: over millions of them FP32's own norm is too small by up to 2e-4."""


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of all tensors together, a scalar; 0 for no tensors, not finite if any value is not."""
    pieces = []
    for tensor in tensors:
        pieces += tensor.reshape(-1).split(_PIECE) if tensor.device.type == "cpu" else [tensor]
    return get_total_norm(pieces, foreach=True) if pieces else torch.zeros(())


def redistribute_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Places a gradient like its parameter: pending partial sums over the mesh are reduced."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def global_norm(gradients: Sequence[Tensor], mesh: Mesh, *, num_holders: Sequence[int]) -> float:
    """The L2 norm of the gradients of the whole model; not finite if any shard is not. num_holders: for each gradient,
    the number of ranks that hold each of its elements (`replication`).
    """
    if mesh.world.size == 1 or mesh.is_only_data_parallel:
        return float(total_norm(gradients))
    norms = {}
    for copies in set(num_holders):
        alike = [local(one) for one, number in zip(gradients, num_holders, strict=True) if number == copies]
        norms[copies] = float(total_norm(alike))
    return combine_norms(norms, mesh.world)


def combine_norms(norms: Mapping[int, float], world: World) -> float:
    """The L2 norm of the gradients of the whole model, from the norms on this rank; not finite if any is not. norms: by
    the number of ranks that hold the same elements.
    """
    # The sum over all ranks counts each square once per copy.
    square = sum(norm * norm / copies for copies, norm in norms.items())
    return math.sqrt(world.sums([square])[0])


def replication(parameter: Tensor, mesh: Mesh, *, num_stages: int = 1) -> int:
    """Number of ranks that hold each element. num_stages: pipeline stages that have it (2 for a tied head)."""
    pieces = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            # Not `is_shard`: FSDP's pieces of a tensor-parallel piece are not a plain `Shard`.
            if not placement.is_replicate():
                pieces *= parameter.device_mesh.size(axis)
    return mesh.world.size // mesh.pipeline.size * num_stages // pieces
