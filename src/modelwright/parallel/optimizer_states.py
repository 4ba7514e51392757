"""An optimizer's states before its first step, for code that allocates them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def make_states(optimizer: Optimizer, parameters: Sequence[Tensor] | None = None) -> None:
    """States for those of the parameters (all, if none are given) that have none yet, as they are before the first
    step; none of them has a gradient.

    By a step of rate 0 on zero gradients, which changes no weight: optimizers make their states nowhere else.
    """
    if parameters is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    new = [p for p in parameters if not optimizer.state[p]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in new:
        parameter.grad = None
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()
