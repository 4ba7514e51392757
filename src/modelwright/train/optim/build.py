"""The optimizer of a model, with weight decay on matrices only.

Several optimizers, each with its own parameters, behind the interface of one.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from modelwright.core.errors import ConfigError
from modelwright.train.optim.lion import Lion
from modelwright.train.optim.low_bit_adamw import LowBitAdamW
from modelwright.train.optim.muon import Muon
from modelwright.train.optim.offload import OffloadedAdamW


class MultiOptimizer(Optimizer):
    """`param_groups` are those of all parts; a parameter's state is held by the part that updates it."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{**group} for group in groups], {})
        self.parts = list(parts)
        self.param_groups = groups
        self.state = _Joined(self.parts)  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have gradients."""
        for part in self.parts:
            part.step()


class _Joined(MutableMapping[Tensor, dict[str, Any]]):
    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        self.owner = {p: part for part in parts for group in part.param_groups for p in group["params"]}

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self.owner[parameter].state[parameter]

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self.owner[parameter].state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self.owner[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for part in self.parts for parameter in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self.parts)


OptimizerKind = Literal["adamw", "adamw_8bit", "adamw_bf16_states", "lion", "muon", "sgd"]
"""AdamW (Loshchilov and Hutter 2019), fused, or with states in 8 bits or BF16; Lion; Muon (Jordan et al. 2024) for the
matrices of the blocks, with AdamW's rate (the factor of Liu et al. 2025), and AdamW for all else; plain SGD, without
momentum, which federated averaging is defined with.

The published DeepSeekAdam is `adamw` with `weight_decay_schedule.grad_norm_threshold` 5: every run has its FP32 weights
and states, and skips updates on overflow."""


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
    """Builds an optimizer over the trainable parameters in the order of their names.

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
                text = "optimizer: muon needs whole matrices on every process"
                raise ConfigError(f"{text}; use adamw if parallel.tensor or parallel.zero_stage shards them")
            others = _groups([p for _, p in named if all(p is not matrix for matrix in matrices)], weight_decay)
            parts: list[Optimizer] = [AdamW(others, **adam, fused=True)] if others else []
            if matrices:  # a pipeline's stage may not hold a block
                parts.append(Muon(matrices, lr=learning_rate, weight_decay=weight_decay))
            return MultiOptimizer(parts)


def _groups(parameters: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
