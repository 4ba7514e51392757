"""The optimizer of a model, with weight decay on matrices only."""

from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from modelwright.core.errors import ConfigError
from modelwright.optim.lion import Lion
from modelwright.optim.low_bit_adamw import LowBitAdamW
from modelwright.optim.multi_optimizer import MultiOptimizer
from modelwright.optim.muon import Muon
from modelwright.optim.offload import OffloadedAdamW

OptimizerKind = Literal["adamw", "adamw_8bit", "adamw_bf16_states", "lion", "muon", "sgd"]
"""AdamW (Loshchilov and Hutter 2019), fused, or with states in 8 bits or BF16; Lion; Muon (Jordan et al. 2024) for the
matrices of the blocks, with AdamW's rate (the factor of Liu et al. 2025), and AdamW for all else; plain SGD, without
momentum, which federated averaging is defined with.

What was published as DeepSeekAdam is `adamw` with `weight_decay_schedule.grad_norm_threshold` 5: FP32 weights and
states, and updates that are skipped on overflow, every run has anyway."""


def build_optimizer(
    model: nn.Module,
    kind: OptimizerKind = "adamw",
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    offload: bool = False,
) -> Optimizer:
    """An optimizer over the trainable parameters in the order of their names.

    Parameters of two and more dimensions decay; norms and biases do not. offload: the host updates, and holds AdamW's
    states. Raises `ConfigError` for Muon on sharded matrices.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    adam: dict[str, Any] = {"lr": learning_rate, "betas": betas, "eps": eps}
    groups = _groups([p for _, p in named], weight_decay)
    if offload:
        return OffloadedAdamW(groups, **adam)
    names: dict[Tensor, str] = {p: name for name, p in named}
    match kind:
        case "adamw":
            return AdamW(groups, **adam, fused=True)
        case "adamw_8bit":
            return LowBitAdamW(groups, **adam, names=names, states="int8")
        case "adamw_bf16_states":
            return LowBitAdamW(groups, **adam, names=names, states="bf16")
        case "lion":
            return Lion(groups, lr=learning_rate, betas=betas)
        case "sgd":
            return SGD(groups, lr=learning_rate)
        case "muon":
            matrices = [p for name, p in named if p.dim() == 2 and name.startswith("blocks.")]
            if any(isinstance(p, DTensor) for p in matrices):
                raise ConfigError(
                    "optimizer: muon needs whole matrices on every process; use adamw if parallel.tensor or "
                    "parallel.zero_stage shards them"
                )
            others = _groups([p for _, p in named if all(p is not matrix for matrix in matrices)], weight_decay)
            parts: list[Optimizer] = [AdamW(others, **adam, fused=True)] if others else []
            if matrices:  # a pipeline's stage may hold no block
                parts.append(Muon(matrices, lr=learning_rate, weight_decay=weight_decay))
            return MultiOptimizer(parts)


def _groups(parameters: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
