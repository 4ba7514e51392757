"""Counts the FLOPs of the products that are executed, from the shapes that reach them, 2 per multiply-add.

Wrap the innermost `LinearGemms`, so that only the remaining work is counted after something has been skipped. Attention
and the head are not layers with `LinearGemms`; the code that runs them calls `add`.
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from modelwright.ops.linear_gemms import LinearGemms, Pair


@dataclass
class Executed:
    """Number of FLOPs in this process."""

    flops: int = 0

    def add(self, flops: int) -> None:
        self.flops += flops


def counted(inner: LinearGemms, executed: Executed) -> LinearGemms:
    """`inner`, with the FLOPs it computes added to `executed`."""

    def counting(product: Pair) -> Pair:
        def run(left: Tensor, right: Tensor) -> Tensor:
            result = product(left, right)
            # of matrices (m k), (k n) and (m n), whichever way each lies: (mk * kn * mn) is the square of mkn
            executed.add(2 * math.isqrt(left.numel() * right.numel() * result.numel()))
            return result

        return run

    return replace(
        inner,
        name=f"{inner.name}, counted",
        forward=counting(inner.forward),
        dgrad=counting(inner.dgrad),
        wgrad=counting(inner.wgrad),
    )
