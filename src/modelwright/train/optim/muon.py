"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): a matrix moves by its
orthogonalized momentum.

Matrices of one shape go through the Newton-Schulz iteration together, in BF16 as published if the machine multiplies
BF16 natively, else in FP32, because emulated BF16 would take ten times as long (`ops.lowp_emulation`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelwright.ops.lowp_emulation import is_emulated

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the published quintic iteration: after five rounds singular values are between 0.7 and 1.2."""
NUM_ROUNDS = 5
TOGETHER = 2**22
"""Elements that are iterated together, unless one matrix has more: their copies are the iteration's memory."""


class Muon(Optimizer):
    """Muon with the `Optimizer` interface, over matrices, with Nesterov momentum. Updates have the root mean square of
    AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training"), so that AdamW's learning rates fit.
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
