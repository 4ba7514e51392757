"""PowerSGD: gradients of matrices as products of two thin ones (Vogels, Karimireddy and Jaggi 2019, algorithm 1).

Legend: M and N are a matrix's height and width, R the rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelwright.parallel.gradient_sync import AllReduceSync, Residual, flatten, shaped
from modelwright.parallel.mesh import World


class PowerSgdSync:
    """Rank-`rank` approximation of every matrix by one power iteration, with error feedback.

    P = G Q is summed over the ranks and made orthonormal (by Householder QR, which also handles zero and rank-deficient
    matrices), Q = G^T P is summed; the gradient's sum is then P Q^T, and each rank keeps the error of its own P Q_own^T
    as a residual. Q is kept as the start of the next step. Tensors that would not shrink to `max_share` of their size
    (vectors, small matrices) are summed exactly; more than two dimensions are read as [first, all others].

    The factors of all matrices cross in one message each. `bytes_sent` counts them and the exact part as
    `AllReduceSync` does: 2 (n - 1) / n of the payload, a ring all-reduce.

    P is computed on every rank from the same sums: ranks whose linear algebra rounds differently would drift apart by
    rounding errors. Non-finite values reach all ranks and leave residuals and Q unchanged.
    """

    def __init__(self, world: World, *, rank: int, max_share: float = 0.5, seed: int = 0) -> None:
        self.world = world
        self.rank = rank
        self.max_share = max_share
        self.seed = seed
        self.residual = Residual()
        self.bases_NR: list[Tensor] = []
        self._sum = AllReduceSync(world)

    @property
    def bytes_sent(self) -> int:
        return self._sum.bytes_sent

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        chosen = [gradient for gradient in gradients if self.compresses(gradient)]
        if self.world.size == 1 or not chosen:
            if chosen:
                self.residual.drain(gradients)
            self._sum.reduce(gradients)
            return
        self._sum.reduce([gradient for gradient in gradients if not self.compresses(gradient)])
        # The residual joins before the projection: it is part of the matrix that the factors approximate.
        flat = flatten(chosen)
        left = self.residual.flat(gradients)
        if left is not None:
            parts = zip(shaped(left, gradients), gradients, strict=True)
            flat += flatten([part for part, gradient in parts if self.compresses(gradient)])
        shares_MN = [part.flatten(1) for part in shaped(flat, chosen)]
        bases_NR = self.bases_NR
        if not bases_NR:
            # One seed, on the CPU: all ranks must start from the same bases.
            draw = torch.Generator().manual_seed(self.seed)
            bases_NR = [torch.randn(share.shape[1], self.rank, generator=draw) for share in shares_MN]
        # Only the left factor is summed before it is orthonormalized, so all ranks project onto the same frame.
        left_MR = [share @ base.to(share.device) for share, base in zip(shares_MN, bases_NR, strict=True)]
        self._sum.reduce(left_MR)
        frames_MR = [torch.linalg.qr(left)[0] for left in left_MR]
        own_NR = [share.mT @ frame for share, frame in zip(shares_MN, frames_MR, strict=True)]
        sums_NR = [own.clone() for own in own_NR]
        self._sum.reduce(sums_NR)
        for gradient, frame, total in zip(chosen, frames_MR, sums_NR, strict=True):
            gradient.copy_((frame @ total.mT).view_as(gradient))
        # A non-finite sum keeps the old bases and residuals, or every later step would be non-finite too.
        if all(bool(total.isfinite().all()) for total in sums_NR):
            self.bases_NR = sums_NR
            parts = zip(shares_MN, frames_MR, own_NR, strict=True)
            errors = iter([share - frame @ own.mT for share, frame, own in parts])
            # Gradients that are summed exactly have zeros, because the residual covers all parameters.
            kept = [next(errors) if self.compresses(gradient) else torch.zeros_like(gradient) for gradient in gradients]
            self.residual.tensors = shaped(flatten(kept), gradients)

    def compresses(self, gradient: Tensor) -> bool:
        """Returns whether a gradient of this shape is sent as two factors."""
        if gradient.dim() < 2:
            return False
        height, width = gradient.shape[0], gradient.shape[1:].numel()
        return min(height, width) > self.rank and self.rank * (height + width) <= self.max_share * height * width

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": list(self.residual.tensors), "shared": {"bases": list(self.bases_NR)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.residual.tensors = [tensor.float() for tensor in state["residuals"]]
        self.bases_NR = [base.float() for base in state["shared"]["bases"]]
