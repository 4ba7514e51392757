"""ZeRO by PyTorch's FSDP2: shards of parameters, gradients and optimizer states on the ranks of one axis.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Stage 1 accumulates
gradients over the microbatches of a step and scatters them once; stage 2 scatters them after each microbatch; stage 3
gathers each block when it is needed and frees it afterwards. Weights are sharded in FP32 and gathered in the format in
which their products read them.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from modelwright.core.errors import ConfigError
from modelwright.model.decoder import HEAD_METHODS, Block, Decoder, Linear, decoders_in
from modelwright.parallel.config import ZeroStage


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
    try:
        _shard(model, options, formats)
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


def _shard(model: Decoder, options: Mapping[str, Any], formats: Mapping[str, torch.dtype]) -> None:
    blocks = [block for decoder in decoders_in(model).values() for block in decoder.blocks.values()]
    if set(formats.values()) <= {torch.float32}:
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return
    # The root first, as it takes parameters from within the blocks.
    fully_shard(model, **options, ignored_params=set[nn.Parameter]().union(*map(_projection_weights, blocks)))
    for block in blocks:
        assert isinstance(block, Block)
        parts = {"attention": block.attention, "ffn": block.ffn}
        if len({formats[name] for name in parts}) == 1:
            parts = {"attention": block}
        for name, part in parts.items():
            # Inputs are not cast: products cast their factors themselves. Scales of packed weights keep their format.
            policy = MixedPrecisionPolicy(
                param_dtype=None if is_packed(part) else formats[name],
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
            others = set(part.parameters()) - _projection_weights(part)
            fully_shard(part, **options, mp_policy=policy, ignored_params=others)


def _projection_weights(module: nn.Module) -> set[nn.Parameter]:
    """Returns the weights of all projections in a block or in a part of one, packed or not."""
    weights = set[nn.Parameter]()
    for one in module.modules():
        if isinstance(one, Linear):
            weights.update([cast(nn.Parameter, one.weight)] if one.frozen is None else one.frozen.parameters())
    return weights


def is_packed(module: nn.Module) -> bool:
    """Returns whether projections of a module have packed weights, whose scales must not be rounded."""
    return any(isinstance(one, Linear) and one.frozen is not None for one in module.modules())


def scatter_gradients(model: nn.Module, now: bool) -> None:
    """Sets whether the next backward pass reduces and scatters gradients, or accumulates them whole (ZeRO-1)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [cast(FSDPModule, module) for module in model.modules() if isinstance(module, FSDPModule)]
