"""Clipping of gradients, over many tensors at once. Knows no rank: replicas hold equal gradients."""

import torch
from torch import Tensor


def scale_to_norm(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale in place so that the global norm `norm` becomes at most `max_norm` (Pascanu et al. 2013)."""
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))  # pyright: ignore


def clip_naive(gradients: list[Tensor], max_norm: float) -> float:
    """The definition, step by step; the twin of `ops.total_norm` and `scale_to_norm`. Returns the norm before."""
    norm = sum(float((gradient.double() ** 2).sum()) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm
