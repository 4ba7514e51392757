"""Gradients of a model that is laid out over a mesh: their norm, and where pieces of one parameter must agree.

A gradient is a plain tensor, equal on all ranks of the mesh that hold its parameter, or a DTensor of which each rank
holds a piece.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from modelwright.ops.dtensor import local
from modelwright.ops.total_norm import total_norm
from modelwright.parallel.mesh import Mesh, World


def redistribute_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient laid out as its parameter is: sums that are still split over the mesh are finished."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def global_norm(gradients: Sequence[Tensor], mesh: Mesh, *, num_holders: Sequence[int]) -> float:
    """The L2 norm of the gradients of the whole model; not finite when any piece is not.

    num_holders: for each gradient, how many ranks of the mesh hold each of its elements (`replication`).
    """
    if mesh.world.size == 1 or mesh.is_only_data_parallel:
        return float(total_norm(gradients))
    norms = {}
    for copies in set(num_holders):
        alike = [local(one) for one, number in zip(gradients, num_holders, strict=True) if number == copies]
        norms[copies] = float(total_norm(alike))
    return combine_norms(norms, mesh.world)


def combine_norms(norms: Mapping[int, float], world: World) -> float:
    """The L2 norm of the gradients of the whole model, from the norms of what this rank holds; not finite when any is
    not. norms: by the number of ranks that hold the same."""
    square = sum(norm * norm / copies for copies, norm in norms.items())
    return math.sqrt(world.sums([square])[0])


def parts_norm(parts: Sequence[Tensor], world: World) -> float:
    """The L2 norm of gradients of which every rank holds another part; not finite when any part is not."""
    return combine_norms({1: float(total_norm(parts))}, world)


def replication(parameter: Tensor, mesh: Mesh, *, num_stages: int = 1) -> int:
    """How many ranks hold each element of a parameter; num_stages: pipeline stages that have it (2 for a tied head)."""
    pieces = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():  # FSDP's pieces of a tensor-parallel piece are no plain `Shard`
                pieces *= parameter.device_mesh.size(axis)
    return mesh.world.size // mesh.pipeline.size * num_stages // pieces
