"""Updates that take the loss scale out of the gradients and let it follow overflows.

The finite check between them has agreed with all ranks, along every axis, whether something overflowed, so that all of
them skip the same updates and have the same scale (PyTorch's own scaler asks no other pipeline stage).
"""

from typing import Any

import torch

from modelwright.optim.update import Context
from modelwright.precision.loss_scale import LossScale


class Unscale:
    """Comes before the finite check."""

    def __init__(self, scale: LossScale) -> None:
        self.scale = scale

    def apply(self, context: Context) -> None:
        torch._foreach_mul_(context.gradients, 1.0 / self.scale.value)  # pyright: ignore

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FollowOverflows:
    """Comes right after the finite check; what skips an update later is no overflow."""

    def __init__(self, scale: LossScale) -> None:
        self.scale = scale

    def apply(self, context: Context) -> None:
        context.scalars["loss_scale"] = self.scale.value
        self.scale.update(context.step, context.skip)

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.load_state_dict(state)
