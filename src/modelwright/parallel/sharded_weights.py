"""The weights of a model that is laid out over a mesh: sharded (ZeRO by PyTorch's FSDP2), gathered whole, put back, and
read from disk by each rank for itself. Every rank calls these functions in the same order.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Stage 1 accumulates
gradients over the microbatches of a step and scatters them once; stage 2 scatters them after each microbatch; stage 3
gathers each block when it is needed and frees it afterwards. Weights are sharded in FP32 and gathered in the format in
which their products read them.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from modelwright.core.config import ConfigError
from modelwright.model.decoder import HEAD_METHODS, Block, Decoder, Linear, decoders_in
from modelwright.ops.dtensor import local, own_part
from modelwright.parallel.mesh import Mesh, ZeroStage


def shard_states(
    model: Decoder, sharing: DeviceMesh, zero_stage: ZeroStage, formats: Mapping[str, torch.dtype]
) -> Decoder:
    """Shards parameters, gradients and optimizer states over the mesh `sharing`, in place; names stay.

    formats: format in which projections are gathered, by the part of a block (attention, ffn); everything else is
    gathered in its own format. Each block, also of a decoder among the heads, is gathered as one message, or each of
    its parts where their formats differ. Embedding, last norm and head go with the root, and so do the blocks' norms
    where projections are narrowed: FSDP has one format per message. Raises `ConfigError` for packed weights where this
    version of PyTorch makes integers parameters that require gradients (2.11).
    """
    options: dict[str, Any] = {"mesh": sharing, "reshard_after_forward": zero_stage == 3}
    blocks = [block for decoder in decoders_in(model).values() for block in decoder.blocks.values()]
    try:
        if set(formats.values()) <= {torch.float32}:
            for module in (*blocks, model):
                fully_shard(module, **options)
        else:
            # The root first, as it takes parameters from within the blocks.
            fully_shard(model, **options, ignored_params=set[nn.Parameter]().union(*map(_projection_weights, blocks)))
            for block in blocks:
                assert isinstance(block, Block)
                parts = {"attention": block.attention, "ffn": block.ffn}
                if len({formats[name] for name in parts}) == 1:
                    parts = {"attention": block}
                for name, part in parts.items():
                    # Inputs are not cast: products cast their factors themselves. Packed weights, whose scales must not
                    # be rounded, keep their format.
                    is_packed = any(isinstance(one, Linear) and one.frozen is not None for one in part.modules())
                    policy = MixedPrecisionPolicy(
                        param_dtype=None if is_packed else formats[name],
                        reduce_dtype=torch.float32,
                        cast_forward_inputs=False,
                    )
                    others = set(part.parameters()) - _projection_weights(part)
                    fully_shard(part, **options, mp_policy=policy, ignored_params=others)
    except RuntimeError as error:
        if "can require gradients" not in str(error):
            raise
        raise ConfigError(
            f"lora.base_format: PyTorch {torch.__version__} cannot shard packed weights; use a later version, "
            "parallel.zero_stage 0, or base_format full"
        ) from error
    for module in sharded_modules(model):
        # Sums, never means, because the trainer has already divided. gloo has no pre-multiplied sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for method in HEAD_METHODS:
        register_fsdp_forward_method(model, method)
    return model


def _projection_weights(module: nn.Module) -> set[nn.Parameter]:
    """Returns the weights of all projections in a block or in a part of one, packed or not."""
    weights = set[nn.Parameter]()
    for one in module.modules():
        if isinstance(one, Linear):
            weights.update([cast(nn.Parameter, one.weight)] if one.frozen is None else one.frozen.parameters())
    return weights


def scatter_gradients(model: nn.Module, now: bool) -> None:
    """Sets whether the next backward pass reduces and scatters gradients, or accumulates them whole (ZeRO-1)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [cast(FSDPModule, module) for module in model.modules() if isinstance(module, FSDPModule)]


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
    """Returns whether the model's weights are still on disk, as those of `model.hf.deferred_model`."""
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
