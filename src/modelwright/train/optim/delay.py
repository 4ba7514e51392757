"""Delay compensation: a gradient computed at older weights, corrected toward its value at the present ones.

DC-ASGD (Zheng et al. 2017, Asynchronous Stochastic Gradient Descent with Delay Compensation): the first-order Taylor
term of the gradient, with the Hessian's diagonal approximated by `strength * g * g`. The square of one sample's
gradient estimates the diagonal; the square of a mean over n samples is about n times too small, so a `strength` of
order 1 does nothing here and one of the order of the predicted tokens in a batch does a little. Far more can help or
ruin a run, so it needs tuning.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def compensate(gradients: Sequence[Tensor], now: Sequence[Tensor], then: Sequence[Tensor], *, strength: float) -> None:
    """Computes g += strength * g * g * (now - then) in place. then: weights at which the gradients were computed."""
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
