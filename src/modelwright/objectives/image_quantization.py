"""Quantization-aware training of an image classifier: what its one setting stands for.

Weights have a symmetric step for each output channel, with which batch norms go along: a norm multiplies a channel, and
so its step, and leaves the codes. What training rounds are therefore the codes of the matrix with the norm folded in
(Jacob et al. 2018, section 3.2), whatever the running statistics are at that step.
"""

from collections.abc import Mapping
from typing import Literal

from modelwright.compress.grid_model import TrainedGrid
from modelwright.ops.int_grid import WeightGrid
from modelwright.precision.quantization_aware import QuantizationAwareConfig

ImageQuantization = Literal["none", "int8", "int4", "int8_static", "int4_static"]
OBSERVED_SHARE = 0.1
"""The share of the steps in which static ranges of activations are observed, before anything is rounded."""


def quantization_of(name: ImageQuantization, num_steps: int) -> QuantizationAwareConfig:
    """The grids of a setting other than `none`, and when rounding begins."""
    grid = WeightGrid(bits=4 if name.startswith("int4") else 8)
    if name.endswith("static"):
        start_step = max(1, round(OBSERVED_SHARE * num_steps))
        return QuantizationAwareConfig(weights=grid, activations="tensor_moving_average", start_step=start_step)
    return QuantizationAwareConfig(weights=grid)


def trained_grid(settings: QuantizationAwareConfig, ranges: Mapping[str, tuple[float, float]]) -> TrainedGrid:
    """The grid that a training ends with. ranges: of the layers' inputs, by their names in the classifier."""
    return TrainedGrid(
        weights=settings.weights, activations="tensor" if settings.has_observers else "token", ranges=ranges
    )
