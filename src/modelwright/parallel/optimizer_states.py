"""An optimizer's states before its first step, for those who must place them somewhere. Knows no process."""

import torch
from torch.optim import Optimizer


def make_states(optimizer: Optimizer) -> None:
    """States for parameters that have none yet, as they are before the first step.

    By a step of rate 0 on zero gradients, which changes no weight: optimizers make their states nowhere else.
    """
    new = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state[p]]
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
