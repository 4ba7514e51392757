"""Gathers whole tensors from a model laid out over a mesh, and distributes whole tensors into it. Every rank calls
these functions in the same order.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from modelwright.model.decoder import Decoder
from modelwright.ops.dtensor import local
from modelwright.parallel.mesh import Mesh


def whole_weights(model: nn.Module, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the whole model by name, one at a time, on all ranks. Pipeline stages hold different names."""
    held = dict(model.state_dict())
    if mesh.pipeline.size == 1:
        yield from ((name, _whole(weight)) for name, weight in held.items())
        return
    for name, (owner, shape, dtype) in _owners(held, mesh).items():
        whole = _whole(held[name]).contiguous() if name in held else torch.empty(
            shape, dtype=dtype, device=mesh.world.device
        )  # fmt: skip
        dist.broadcast(whole, group_src=owner, group=mesh.pipeline.group)
        yield name, whole


def _owners(mine: Mapping[str, Tensor], mesh: Mesh) -> dict[str, tuple[int, torch.Size, torch.dtype]]:
    """The first stage that holds each name, with shape and dtype, in the same order on all ranks."""
    mine_as_json = {
        name: (list(weight.shape), str(weight.dtype).removeprefix("torch.")) for name, weight in mine.items()
    }
    result: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
    for stage, held in enumerate(mesh.pipeline.gather_json(mine_as_json)):
        for name, (shape, dtype) in held.items():
            result.setdefault(name, (stage, torch.Size(shape), getattr(torch, dtype)))
    return result


@torch.no_grad()
def put(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's shard of `whole` into `target`, in place, without communication."""
    local(target).copy_(whole[own_part(target)])


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """This rank's shard as slices of the whole tensor; all of it for a plain one."""
    shape, offset = tensor.shape, (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def move_out(model: Decoder) -> Decoder:
    """A model that takes over the weights of `model`, to be laid out; `model` keeps shapes but no values."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    taken = copy.deepcopy(model, shared)
    _set_weights(model, {name: parameter.to("meta") for name, parameter in model.named_parameters()})
    return taken


def restore_weights(model: Decoder, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Put whole weights and buffers back into a model whose weights were taken."""
    for name, whole in weights:
        _set_weights(model, {name: whole.detach()})


def _set_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        place, _, own = name.rpartition(".")
        module = model.get_submodule(place)
        if own in dict(module.named_buffers(recurse=False)):
            setattr(module, own, weight)
            continue
        setattr(module, own, nn.Parameter(weight, requires_grad=getattr(module, own).requires_grad))


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
