"""An optimizer's states before its first step, for code that allocates them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def make_states(optimizer: Optimizer, parameters: Sequence[Tensor] | None = None) -> None:
    """Create states, as they are before the first step, for those of the parameters (all by default) that have none;
    none of them has a gradient. It takes a step of rate 0 on zero gradients, which changes no weight, because
    optimizers create their states nowhere else.
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
