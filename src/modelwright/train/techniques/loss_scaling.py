"""Loss scaling: removes the scale from the gradients and adjusts it to overflows.

The finite check has agreed with all ranks, along every axis, whether something overflowed, so that all of them skip the
same updates and have the same scale (PyTorch's own scaler does not synchronize pipeline stages).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelwright.parallel.mesh import World
from modelwright.train.precision.layer_scales import SMALLEST_NORMAL, LayerFindings, LayerScales
from modelwright.train.precision.loss_scale import LossScale
from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique, Update


@dataclass(eq=False)
class UniformLossScale:
    """Keeps one scale for all gradients, adjusted to overflows; also the `LossScaler` of the run."""

    scale: LossScale

    @property
    def value(self) -> float:
        return self.scale.value

    def unscale(self, gradients: list[Tensor]) -> None:
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale.value)  # pyright: ignore

    def on_gradients(self, update: Update) -> None:
        """Acts right after the finite check; updates skipped later are not overflows."""
        update.metrics["loss_scale"] = self.scale.value
        self.scale.update(update.step, update.skipped)


@dataclass(eq=False)
class PerLayerLossScale:
    """Keeps a scale for each layer, adjusted to its overflows; also the `LossScaler` of such a run.

    `unscale` is called before gradients are sent, while this rank's own overflows can still be distinguished from those
    of others. world: the ranks that make updates together, whichever layers they hold. names: of the parameters, in the
    order of their gradients; those without a gradient are skipped.
    """

    scales: LayerScales
    world: World
    names: Mapping[Tensor, str]
    _largest: list[float] = field(default_factory=list[float])
    _counts: list[float] = field(default_factory=list[float])
    _common_overflowed: bool = False

    @property
    def value(self) -> float:
        """The scale between blocks."""
        return self.scales.common.value

    def unscale(self, gradients: list[Tensor]) -> None:
        """Unscale gradients in place; stores this rank's findings for `on_gradients`."""
        names = [name for parameter, name in self.names.items() if parameter.grad is not None]
        paths = [name.split(".") for name in names]
        layers = [int(path[1]) if path[0] == "blocks" else None for path in paths]
        scales = [self.scales.common.value if layer is None else self.scales.values[layer] for layer in layers]
        # The largest magnitude of each gradient, nan where one is nan; local shards may be empty.
        held = [gradient for gradient in gradients if gradient.numel()]
        norms: Iterator[float] = iter(())
        if held:
            norms = iter(torch.stack(torch._foreach_norm(held, math.inf)).tolist())  # pyright: ignore
        extremes = [next(norms) if gradient.numel() else 0.0 for gradient in gradients]
        num_layers = len(self.scales.values)
        self._largest = [0.0] * num_layers
        for layer, value in zip(layers, extremes, strict=True):
            if layer is not None and not self._largest[layer] >= value:  # nan wins
                self._largest[layer] = value
        # The embedding is left out: its gradient comes last, so an overflow of a block reaches it, too.
        self._common_overflowed = any(
            name.startswith(("norm.", "head.")) and not math.isfinite(value)
            for name, value in zip(names, extremes, strict=True)
        )
        # For each layer that is due, the number of elements of its matrices below FP16's normal numbers while they are
        # scaled, and then their total number.
        small, total = [0.0] * num_layers, [0.0] * num_layers
        for layer, gradient in zip(layers, gradients, strict=True):
            if layer is not None and gradient.dim() >= 2 and self.scales.due(layer):
                small[layer] += float((gradient.abs() < SMALLEST_NORMAL).sum())
                total[layer] += gradient.numel()
        self._counts = [*small, *total]
        torch._foreach_mul_(list(gradients), [1.0 / scale for scale in scales])  # pyright: ignore

    def on_gradients(self, update: Update) -> None:
        num_layers = len(self.scales.values)
        flags = [float(not math.isfinite(value)) for value in self._largest]
        known = [value if math.isfinite(value) else 0.0 for value in self._largest]
        agreed = self.world.maxima(float(self._common_overflowed), *flags, *known)
        counts = self.world.sums(self._counts) if any(map(self.scales.due, range(num_layers))) else self._counts
        result = [
            LayerFindings(largest=agreed[1 + num_layers + layer], small=small / max(1.0, total))
            for layer, (small, total) in enumerate(zip(counts[:num_layers], counts[num_layers:], strict=True))
        ]
        # Backward runs from the last block to the first, so the highest layer that overflowed infected those below it.
        # An overflow in the head or in the loss began above all blocks.
        began = [layer for layer in range(num_layers) if agreed[1 + layer]]
        culprit = max(began) if began and not agreed[0] and math.isfinite(update.loss) else None
        update.metrics["loss_scale"] = self.scales.common.value
        update.metrics["loss_scale/lowest_layer"] = min(self.scales.values)
        update.metrics["loss_scale/highest_layer"] = max(self.scales.values)
        self.scales.update(update.step, overflowed=update.skipped, culprit=culprit, found=result)


def loss_scaling(run: Runtime) -> Technique | None:
    """Makes the run scale its losses, and adjusts the scale; None if losses are not scaled."""
    scale, layers = run.scales.common, run.scales.layers
    if scale is None:
        return None
    if layers is None:
        scaler = UniformLossScale(scale)
        state, summary = scale, scale.state_dict
    else:
        scaler = PerLayerLossScale(layers, run.mesh.world, run.replica.names)
        state, summary = layers, lambda: {**scale.state_dict(), "layers": layers.state_dict()}
    run.scaler = scaler
    return Technique(
        name="loss_scaling", on_gradients=scaler.on_gradients, state=state, summary=summary, needs=frozenset()
    )
