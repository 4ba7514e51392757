"""Counts the FLOPs of the products that are executed, from the shapes that reach them, 2 per multiply-add.

Wrap the innermost `LinearGemms`, so that skipped work does not count. Attention and the head are not layers with
`LinearGemms`; the code that runs them calls `add`.
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from modelwright.ops.linear_gemms import LinearGemms, Pair


@dataclass
class Executed:
    """Counter of the FLOPs in this process."""

    flops: int = 0

    def add(self, flops: int) -> None:
        self.flops += flops


def counted(inner: LinearGemms, executed: Executed) -> LinearGemms:
    """Wraps `inner` so that its FLOPs are added to `executed`."""

    def counting(product: Pair) -> Pair:
        def run(left: Tensor, right: Tensor) -> Tensor:
            result = product(left, right)
            # Of matrices (m k), (k n) and (m n), transposed or not: (mk * kn * mn) is the square of mkn.
            executed.add(2 * math.isqrt(left.numel() * right.numel() * result.numel()))
            return result

        return run

    forward, dgrad, wgrad = map(counting, (inner.forward, inner.dgrad, inner.wgrad))
    return replace(inner, name=f"{inner.name}, counted", forward=forward, dgrad=dgrad, wgrad=wgrad)
