"""Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms): the sign of an interpolated momentum.

One state instead of AdamW's two. Its learning rates are 3 to 10 times smaller than AdamW's and its weight decay is
larger by the same factor. On a sharded parameter each rank updates its own shard.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from modelwright.ops.dtensor import local


class Lion(Optimizer):
    """Lion with the `Optimizer` interface. betas: of the applied interpolation, and of the stored momentum."""

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
