"""A loss scale for each block, on top of the common one (Zhao et al. 2019, Adaptive Loss Scaling for Mixed Precision
Training: layers differ in how large their gradients are, so that one scale suits few of them).

Between blocks gradients carry the common scale S. Entering a block's backward pass, a gradient is multiplied by the
block's own scale over S, leaving it by the inverse; the forward pass is unchanged. All of them are powers of two, so
block's own scale over S, leaving it by the inverse; the forward pass is unchanged. All of them are powers of two, so
nothing changes unless something overflows or would have underflowed (and between blocks neither happens if the residual
stream is FP32). A block's scale falls when the overflow began there: when it is the first block of the backward pass
with gradients that are not finite; the blocks behind it that have not had a good update yet are lowered too, or a first
scale that is too large would have to be discovered block by block. It grows when too many of its gradients are small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelwright.model.decoder import Decoder
from modelwright.train.precision.loss_scale import MAX_HISTORY, LossScale, LossScaleConfig, loss_scale_for

SMALLEST_NORMAL = 2.0**-14
LARGEST = 65504.0
"""FP16's smallest normal and largest finite number."""
HEADROOM = 4.0
"""Least ratio of FP16's largest number to the largest gradient of a block after its scale has grown."""


@dataclass(frozen=True, kw_only=True)
class LayerFindings:
    """Statistics of one block's scaled gradients: `largest` by magnitude, 0 if unknown; `small`: the fraction below
    FP16's normal numbers, 0 unless the block was `due`.
    """

    largest: float = 0.0
    small: float = 0.0


class LayerScales:
    """The scales of the present update, by layer, and their updates. `common`: the scale of everything else."""

    def __init__(self, config: LossScaleConfig, common: LossScale, num_layers: int, device: torch.device) -> None:
        self.config = config
        self.common = common
        self.values = [common.value] * num_layers
        self.num_overflows = [0] * num_layers
        self.history: list[tuple[int, int, float]] = []
        """(update from which on, layer, scale)"""
        self._num_good = [0] * num_layers
        self._fitted = [False] * num_layers
        self.entering = [torch.ones((), device=device) for _ in range(num_layers)]
        self.leaving = [torch.ones((), device=device) for _ in range(num_layers)]

    def due(self, layer: int) -> bool:
        """True if the layer's window ends with the present update, provided that it is good."""
        return self._num_good[layer] + 1 >= self.config.growth_interval

    def update(self, step: int, *, overflowed: bool, culprit: int | None, found: Sequence[LayerFindings]) -> None:
        """Call after update `step` (from 0). culprit: the layer in which an overflow began, None if none did. Layers
        whose backward pass came before the culprit's had a good update.
        """
        config = self.config
        self.common.update(step, overflowed and culprit is None)
        self.common.num_overflows += overflowed and culprit is not None
        for layer, findings in enumerate(found):
            if overflowed and (culprit is None or layer <= culprit):
                continue
            self._num_good[layer] += 1
            self._fitted[layer] = True
            if self._num_good[layer] >= config.growth_interval:
                self._num_good[layer] = 0
                has_room = findings.largest * config.growth_factor * HEADROOM <= LARGEST
                if findings.small > config.max_underflow_fraction and has_room:
                    self._set(step, layer, self.values[layer] * config.growth_factor)
        if overflowed and culprit is not None:
            self.num_overflows[culprit] += 1
            self._num_good[culprit] = 0
            self._set(step, culprit, self.values[culprit] * config.backoff_factor)
        if overflowed:
            # Layers after the culprit in the backward pass (all for None) without a good update so far fall, too.
            fallen = self.common.value if culprit is None else self.values[culprit]
            for layer in range(len(self.values) if culprit is None else culprit):
                if not self._fitted[layer]:
                    self._set(step, layer, min(self.values[layer], fallen))
        self._set_factors()

    def state_dict(self) -> dict[str, Any]:
        return {
            "common": self.common.state_dict(),
            "values": list(self.values),
            "num_good": list(self._num_good),
            "fitted": list(self._fitted),
            "num_overflows": list(self.num_overflows),
            "history": [list(change) for change in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.common.load_state_dict(state["common"])
        self.values, self._num_good = list(state["values"]), list(state["num_good"])
        self.num_overflows, self._fitted = list(state["num_overflows"]), list(state["fitted"])
        self.history = [(int(step), int(layer), float(value)) for step, layer, value in state["history"]]
        self._set_factors()

    def _set(self, step: int, layer: int, value: float) -> None:
        value = min(max(value, self.config.min_scale), self.config.max_scale)
        if value != self.values[layer]:
            self.values[layer] = value
            self.history = [*self.history, (step + 1, layer, value)][-MAX_HISTORY:]

    def _set_factors(self) -> None:
        # In place, because blocks hold these tensors, and compiled ones must not be recompiled.
        for value, entering, leaving in zip(self.values, self.entering, self.leaving, strict=True):
            entering.fill_(value / self.common.value)
            leaving.fill_(self.common.value / value)


def scale_blocks(model: Decoder, scales: LayerScales) -> Decoder:
    """Rescales gradients at both ends of every block on this rank, in place. Apply it before all that reruns blocks."""
    for name, block in model.blocks.items():
        layer = int(name)
        block.forward = partial(_scaled, block.forward, scales.entering[layer], scales.leaving[layer])
    return model


def layer_scales_for(
    config: LossScaleConfig, *, uses_fp16: bool, count: Callable[[], int], num_layers: int, device: torch.device
) -> LayerScales | None:
    """Makes the scales of layers; None if losses are not scaled, or have one scale."""
    common = loss_scale_for(config, uses_fp16=uses_fp16, count=count) if config.per_layer else None
    return LayerScales(config, common, num_layers, device) if common else None


@dataclass(frozen=True, kw_only=True)
class LossScales:
    """The scales of a run's losses. common: the only one, or the one between blocks, None if losses are not scaled;
    layers: those of blocks with separate scales, else None.
    """

    common: LossScale | None
    layers: LayerScales | None


def loss_scales_for(
    config: LossScaleConfig, *, uses_fp16: bool, count: Callable[[], int], num_layers: int, device: torch.device
) -> LossScales:
    layers = layer_scales_for(config, uses_fp16=uses_fp16, count=count, num_layers=num_layers, device=device)
    common = layers.common if layers else loss_scale_for(config, uses_fp16=uses_fp16, count=count)
    return LossScales(common=common, layers=layers)


def _scaled(
    forward: Callable[..., Tensor], entering: Tensor, leaving: Tensor, hidden_BTD: Tensor, *rest: Any
) -> Tensor:
    return _Rescaled.apply(forward(_Rescaled.apply(hidden_BTD, leaving), *rest), entering)  # type: ignore[return-value]


class _Rescaled(torch.autograd.Function):
    """Identity in forward; multiplies gradients by `factor` in backward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.detach()  # not a view: FSDP warns of a block that returns one

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * factor, None
