"""The optimizer of a model, with weight decay on matrices only; Lion and Muon, several optimizers behind the
interface of one, and the compensation of gradients that come late.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from modelwright.core.config import ConfigError
from modelwright.ops.dtensor import local
from modelwright.ops.matmul import is_emulated
from modelwright.train.optim.adamw import LowBitAdamW, OffloadedAdamW, StatesElsewhere

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


class MultiOptimizer(Optimizer):
    """`param_groups` are those of all parts; a parameter's state is held by the part that updates it."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{**group} for group in groups], {})
        self.parts = list(parts)
        self.param_groups = groups
        owner = {p: part for part in parts for group in part.param_groups for p in group["params"]}

        def take(parameter: Tensor, state: Mapping[str, Any] | None) -> None:
            if state is None:
                del owner[parameter].state[parameter]
            else:
                owner[parameter].state[parameter] = state

        self.state = StatesElsewhere(  # pyright: ignore[reportAttributeAccessIssue]
            lambda: [p for part in self.parts for p in part.state], lambda p: owner[p].state[p], take
        )

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have gradients."""
        for part in self.parts:
            part.step()


class Lion(Optimizer):
    """Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms): the sign of an interpolated momentum.
    betas: of the applied interpolation, and of the stored momentum.

    One state instead of AdamW's two. Its learning rates are 3 to 10 times smaller than AdamW's and its weight decay is
    larger by the same factor. On a sharded parameter each rank updates its own shard.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__([{**group} for group in groups], {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have gradients."""
        for group in self.param_groups:
            changed = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not changed:
                continue
            for parameter in changed:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            weights = [local(parameter) for parameter in changed]
            gradients = [local(parameter.grad) for parameter in changed]
            momenta = [local(self.state[parameter]["exp_avg"]) for parameter in changed]
            applied, kept = group["betas"]
            # The applied move is made of the old momentum; the stored one is updated last, with another beta.
            moves = torch._foreach_lerp(momenta, gradients, 1 - applied)  # pyright: ignore
            torch._foreach_sign_(moves)  # pyright: ignore
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])  # pyright: ignore
            torch._foreach_add_(weights, moves, alpha=-group["lr"])  # pyright: ignore
            torch._foreach_lerp_(momenta, gradients, 1 - kept)  # pyright: ignore


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the published quintic iteration: after five rounds singular values are between 0.7 and 1.2."""


NUM_ROUNDS = 5


TOGETHER = 2**22
"""Elements that are iterated together, unless one matrix has more: their copies are the iteration's memory."""


class Muon(Optimizer):
    """Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): a matrix moves by its
    orthogonalized momentum, here Nesterov's. Updates have the root mean square of AdamW's (Liu et al. 2025, "Muon is
    Scalable for LLM Training"), so that AdamW's learning rates fit.

    Matrices of one shape go through the Newton-Schulz iteration together, in BF16 as published if the machine
    multiplies BF16 natively, else in FP32, because emulated BF16 would take ten times as long.
    """

    def __init__(
        self, matrices: Sequence[Tensor], *, lr: float, weight_decay: float, momentum: float = 0.95, eps: float = 1e-7
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all matrices that have gradients."""
        batches: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            for shape, alike in by_shape.items():
                most = max(1, TOGETHER // shape.numel())
                batches += [(group, alike[first : first + most]) for first in range(0, len(alike), most)]
        for group, matrices in batches:
            for matrix in matrices:
                if not self.state[matrix]:
                    self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
            momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            gradients = [matrix.grad for matrix in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])  # pyright: ignore
            # Nesterov: the gradient is mixed with the momentum that already contains it.
            ahead = torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"]))  # pyright: ignore
            moves = orthogonal(ahead, eps=group["eps"]).to(matrices[0].dtype).unbind()
            # An orthogonal matrix has a root mean square of 1 / sqrt(longer side); 0.2 is typical of AdamW.
            rate = group["lr"] * 0.2 * math.sqrt(max(matrices[0].shape))
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])  # pyright: ignore
            torch._foreach_add_(matrices, moves, alpha=-rate)  # pyright: ignore


def orthogonal(matrices_BMN: Tensor, *, eps: float = 1e-7) -> Tensor:
    """Replaces each matrix U S V^T by approximately U V^T, in the format of the iteration."""
    is_tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    dtype = torch.float32 if is_emulated(torch.bfloat16, matrices_BMN.device) else torch.bfloat16
    wide_BMN = (matrices_BMN.mT if is_tall else matrices_BMN).to(dtype)
    a, b, c = COEFFICIENTS
    # The iteration converges for singular values up to 1, which the Frobenius norm bounds.
    wide_BMN = wide_BMN / wide_BMN.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(NUM_ROUNDS):
        gram_BMM = wide_BMN @ wide_BMN.mT
        gram_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        wide_BMN = torch.baddbmm(wide_BMN, gram_BMM, wide_BMN, beta=a)
    return wide_BMN.mT if is_tall else wide_BMN


def update_flops(rows: int, columns: int) -> float:
    """FLOPs of one update of a matrix: three products per round, two of the wide matrix and its Gram matrix."""
    short, long = sorted((rows, columns))
    return NUM_ROUNDS * (4.0 * short**2 * long + 2.0 * short**3)


@torch.no_grad()
def compensate(gradients: Sequence[Tensor], now: Sequence[Tensor], then: Sequence[Tensor], *, strength: float) -> None:
    """Corrects gradients computed at older weights toward their values at the present ones, in place:
    g += strength * g * g * (now - then). then: weights at which they were computed.

    DC-ASGD (Zheng et al. 2017, Asynchronous Stochastic Gradient Descent with Delay Compensation): the first-order
    Taylor term of the gradient, with the Hessian's diagonal approximated by `strength * g * g`. The square of one
    sample's gradient estimates the diagonal; the square of a mean over n samples is about n times too small, so a
    `strength` of order 1 does nothing here and one of the order of the predicted tokens in a batch does a little. Far
    more can help or ruin a run, so it needs tuning.
    """
    change = torch._foreach_sub(list(now), list(then))  # pyright: ignore
    torch._foreach_mul_(change, list(gradients))  # pyright: ignore
    torch._foreach_mul_(change, list(gradients))  # pyright: ignore
    torch._foreach_add_(list(gradients), change, alpha=strength)  # pyright: ignore


@torch.no_grad()
def compensate_naive(
    gradients: Sequence[Tensor], now: Sequence[Tensor], then: Sequence[Tensor], *, strength: float
) -> None:
    """Applies the formula tensor by tensor: the reference for `compensate`."""
    for gradient, here, there in zip(gradients, now, then, strict=True):
        gradient.copy_(gradient + strength * gradient * gradient * (here - there))
