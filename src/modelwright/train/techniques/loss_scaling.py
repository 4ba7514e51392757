"""Updates that take the loss scale out of the gradients and let it follow overflows.

The finite check between them has agreed with all ranks, along every axis, whether something overflowed, so that all of
them skip the same updates and have the same scale (PyTorch's own scaler asks no other pipeline stage).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelwright.optim.update import Context
from modelwright.parallel.mesh import World
from modelwright.precision.layer_scales import SMALLEST_NORMAL, LayerFindings, LayerScales
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


class FollowLayers:
    """`FollowOverflows` with a scale for each layer. `unscale` comes before gradients cross, while what this rank found
    can still be told from what others did.

    world: the ranks that make updates together, whichever layers they hold.
    """

    def __init__(self, scales: LayerScales, world: World) -> None:
        self.scales = scales
        self.world = world
        self._largest: list[float] = []
        self._counts: list[float] = []
        self._common_overflowed = False

    def unscale(self, gradients: Sequence[Tensor], names: Sequence[str]) -> None:
        """In place. Keeps what `apply` wants to know. names: of the parameters that have a gradient in this step."""
        layers = [layer_of(name) for name in names]
        scales = [self.scales.common.value if layer is None else self.scales.values[layer] for layer in layers]
        extremes = _largest(gradients)
        num_layers = len(self.scales.values)
        self._largest = [0.0] * num_layers
        for layer, value in zip(layers, extremes, strict=True):
            if layer is not None and not self._largest[layer] >= value:  # nan wins
                self._largest[layer] = value
        self._common_overflowed = any(
            name.startswith(("norm.", "head.")) and not math.isfinite(value)
            for name, value in zip(names, extremes, strict=True)
        )
        self._counts = self._count_small(gradients, layers)
        torch._foreach_mul_(list(gradients), [1.0 / scale for scale in scales])  # pyright: ignore

    def apply(self, context: Context) -> None:
        num_layers = len(self.scales.values)
        flags = [float(not math.isfinite(value)) for value in self._largest]
        known = [value if math.isfinite(value) else 0.0 for value in self._largest]
        agreed = self.world.maxima(float(self._common_overflowed), *flags, *known)
        counts = self.world.sums(self._counts) if any(map(self.scales.due, range(num_layers))) else self._counts
        found = [
            LayerFindings(largest=agreed[1 + num_layers + layer], small=small / max(1.0, total))
            for layer, (small, total) in enumerate(zip(counts[:num_layers], counts[num_layers:], strict=True))
        ]
        began = [layer for layer in range(num_layers) if agreed[1 + layer]]
        culprit = max(began) if began and not agreed[0] and math.isfinite(context.loss) else None
        context.scalars["loss_scale"] = self.scales.common.value
        context.scalars["loss_scale/lowest_layer"] = min(self.scales.values)
        context.scalars["loss_scale/highest_layer"] = max(self.scales.values)
        self.scales.update(context.step, overflowed=context.skip, culprit=culprit, found=found)

    def state_dict(self) -> dict[str, Any]:
        return self.scales.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scales.load_state_dict(state)

    def _count_small(self, gradients: Sequence[Tensor], layers: Sequence[int | None]) -> list[float]:
        """For each layer that is due, how many elements of its matrices lie below FP16's normal numbers while they are
        scaled, and then how many there are."""
        num_layers = len(self.scales.values)
        small, total = [0.0] * num_layers, [0.0] * num_layers
        for layer, gradient in zip(layers, gradients, strict=True):
            if layer is not None and gradient.dim() >= 2 and self.scales.due(layer):
                small[layer] += float((gradient.abs() < SMALLEST_NORMAL).sum())
                total[layer] += gradient.numel()
        return [*small, *total]


def layer_of(name: str) -> int | None:
    """The block that a parameter belongs to, by its name."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def _largest(gradients: Sequence[Tensor]) -> list[float]:
    """Of each gradient by magnitude, nan where one is; pieces may be empty."""
    held = [gradient for gradient in gradients if gradient.numel()]
    norms = iter(torch.stack(torch._foreach_norm(held, math.inf)).tolist()) if held else iter(())  # pyright: ignore
    return [next(norms) if gradient.numel() else 0.0 for gradient in gradients]
