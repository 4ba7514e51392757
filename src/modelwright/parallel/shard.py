"""ZeRO by PyTorch's FSDP2: what every copy of a model would hold is divided among the ranks of one axis.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Stage 1 adds gradients
up over the microbatches of a step and scatters them once; stage 2 scatters them after each microbatch; stage 3 gathers
each block when it is needed and lets it go. Gradients leave as sums, never means: the loop has divided already. Knows
nothing about rows or losses.
"""

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from modelwright.model.decoder import Decoder
from modelwright.parallel.config import Shard


def shard_states(model: Decoder, sharing: DeviceMesh, shard: Shard) -> Decoder:
    """Divide parameters, gradients and optimizer states over the mesh `sharing`, in place; names stay.

    Each block is gathered as one message; embedding, norm and head go with the root.
    """
    reshard = shard == "full"
    for block in model.blocks.values():
        fully_shard(block, mesh=sharing, reshard_after_forward=reshard)
    fully_shard(model, mesh=sharing, reshard_after_forward=reshard)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    for method in ("cross_entropy", "logits"):
        register_fsdp_forward_method(model, method)
    return model


def scatter_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass sums and scatters gradients, or keeps them whole to be added to (ZeRO-1)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [cast(FSDPModule, module) for module in model.modules() if isinstance(module, FSDPModule)]
