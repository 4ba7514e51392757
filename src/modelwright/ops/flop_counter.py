"""Counts the FLOPs of the products that really run, from the shapes that reach them. 2 for a multiply-add.

Put it innermost, so that it sees what is left after something has been left out. Attention and the head are no layers
with `LinearGemms`: who runs them says so with `add`.
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from modelwright.ops.linear_gemms import LinearGemms, Pair


@dataclass
class Executed:
    """A sum of FLOPs, in this process."""

    flops: int = 0

    def add(self, flops: int) -> None:
        self.flops += flops


def counted(inner: LinearGemms, executed: Executed) -> LinearGemms:
    """`inner`, with what it computes added to `executed`."""

    def counting(product: Pair) -> Pair:
        def run(left: Tensor, right: Tensor) -> Tensor:
            found = product(left, right)
            # of matrices (m k), (k n) and (m n), whichever way each lies: (mk * kn * mn) is the square of mkn
            executed.add(2 * math.isqrt(left.numel() * right.numel() * found.numel()))
            return found

        return run

    return replace(
        inner,
        name=f"{inner.name}, counted",
        forward=counting(inner.forward),
        input_gradient=counting(inner.input_gradient),
        weight_gradient=counting(inner.weight_gradient),
    )
