"""Gathers whole tensors from a model laid out over a mesh, and distributes whole tensors into it. Every rank calls
these functions in the same order.

Weights that stay on disk until a model is laid out: each rank reads its own part of each file, and nothing else.

`model.hf.deferred_model` makes such a model, with parameters on the meta device.
"""

import copy
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from modelwright.model.decoder import Decoder
from modelwright.ops.dtensor import local
from modelwright.parallel.mesh import Mesh


def whole_weights(model: nn.Module, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight of the whole model by name, one at a time, on all ranks of all pipeline stages."""
    own = dict(model.state_dict())
    if mesh.pipeline.size == 1:
        yield from ((name, _whole(weight)) for name, weight in own.items())
        return
    own_as_json = {name: (list(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in own.items()}
    # A tied embedding is in two stages: the first one sends it. All ranks go through the names in the same order,
    # because each is a collective.
    owners: dict[str, tuple[int, list[int], str]] = {}
    for stage, held in enumerate(mesh.pipeline.gather_json(own_as_json)):
        for name, (shape, dtype) in held.items():
            owners.setdefault(name, (stage, shape, dtype))
    for name, (owner, shape, dtype) in owners.items():
        if name in own:
            whole = _whole(own[name]).contiguous()
        else:
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.world.device)
        dist.broadcast(whole, group_src=owner, group=mesh.pipeline.group)
        yield name, whole


@torch.no_grad()
def put(target: Tensor, whole: Tensor) -> None:
    """Copies this rank's shard of `whole` into `target`, in place, without communication."""
    local(target).copy_(whole[own_part(target)])


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Returns this rank's shard as slices of the whole tensor; all of it for a plain tensor."""
    shape, offset = tensor.shape, (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def move_out(model: Decoder) -> Decoder:
    """Returns a copy that takes over the weights of `model`, to be laid out; `model` keeps shapes but no values."""
    # Known to `deepcopy` as copied already, so that weights are moved and never exist twice.
    shared = {id(parameter): parameter for parameter in model.parameters()}
    taken = copy.deepcopy(model, shared)
    restore_weights(model, [(name, parameter.to("meta")) for name, parameter in model.named_parameters()])
    return taken


def restore_weights(model: Decoder, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Puts whole weights and buffers back into a model whose weights were moved out."""
    for name, whole in weights:
        place, _, own = name.rpartition(".")
        module, weight = model.get_submodule(place), whole.detach()
        if own not in dict(module.named_buffers(recurse=False)):
            weight = nn.Parameter(weight, requires_grad=getattr(module, own).requires_grad)
        setattr(module, own, weight)


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def is_deferred(model: Decoder) -> bool:
    """Returns whether the model's weights are still on disk."""
    return model.stored is not None and any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def read_deferred(model: Decoder, device: torch.device) -> None:
    """Allocates this rank's shards on the device and reads them, in place; does nothing if the weights are loaded."""
    if not is_deferred(model):
        return
    assert model.stored is not None
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        own = own_part(parameter)
        # With more ranks than rows a rank's shard is empty, and there is no such slice in the file.
        if all(part.start < part.stop for part in own):
            local(parameter).copy_(model.stored.read(name, own))
