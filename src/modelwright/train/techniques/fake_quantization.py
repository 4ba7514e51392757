"""Quantization-aware training: the decoder's linear layers multiply weights and activations that are rounded to the
grid of integer inference (Jacob et al. 2018); the integers are made in `compress/int8.py`.

A technique and a model pass through `ModelPrecision.quantize`. Ranges of activations are those of all ranks. They are
observed in the steps before rounding begins, and fixed from then on.

Legend: N tokens, O outputs, I inputs, G groups of a weight.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modelwright.core.artifacts import write_atomic
from modelwright.core.compatibility import EAGER_BLOCKS, TRAINED_WEIGHTS, WHOLE_LAYERS
from modelwright.core.config import ConfigError
from modelwright.model.decoder import Decoder, ModelConfig, Product
from modelwright.ops.int_grid import WeightGrid, activation_range, fake_quantize, lsq_step, round_tokens
from modelwright.parallel.sharded_weights import put, whole_weights
from modelwright.train.objective import Batch
from modelwright.train.technique import Runtime, StepInfo, Technique, Update

Activations = Literal["none", "token", "tensor_min_max", "tensor_moving_average"]
MODULE = "quantization"
"""The name of the learned steps among a model's `heads`."""
MOVING = 0.9
"""Weight of the last value in a moving average."""


@dataclass(frozen=True, kw_only=True)
class QuantizationAwareConfig:
    """Grids, and the step at which rounding begins. learned_steps: train the weights' steps as parameters (LSQ)."""

    weights: WeightGrid = field(default_factory=WeightGrid)
    activations: Activations = "token"
    learned_steps: bool = False
    start_step: int = 0

    def __post_init__(self) -> None:
        if self.learned_steps and not self.weights.symmetric:
            raise ConfigError("asymmetric: learned_steps are those of a symmetric grid; choose one of the two")
        if self.start_step < 0:
            raise ConfigError(f"start_step: must not be negative, got {self.start_step}; 0 rounds from the first step")
        if self.has_observers and not self.start_step:
            text = f"start_step: activations {self.activations} are observed in the steps before it"
            raise ConfigError(f"{text}; set it to 1 or more")

    @property
    def has_observers(self) -> bool:
        """True if the range of activations is observed."""
        return self.activations.startswith("tensor")


class StepSizes(nn.Module):
    """The learned steps of the weights of all projections, as logarithms to the base 2, [G] each.

    The logarithm keeps a step positive, and lets an optimizer such as Adam change it by a share of itself.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], grid: WeightGrid) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(_key(name), nn.Parameter(torch.zeros(grid.num_groups(shape))))

    def step(self, name: str) -> Tensor:
        """The steps of one projection."""
        return torch.exp2(self.get_parameter(_key(name)))


def _key(name: str) -> str:
    return name.replace(".", "_")


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of all projections of a decoder of this shape, by name."""
    with torch.device("meta"):
        model = Decoder(config)
    return {name: (one.out_features, one.in_features) for name, one in model.projections().items()}


@dataclass(kw_only=True)
class Range:
    """The observed range of one layer's inputs."""

    least: float = 0.0
    most: float = 0.0
    is_empty: bool = True


@dataclass(kw_only=True)
class FakeQuantization:
    """Rounds the factors of one model's projections. is_on: in training; evaluation rounds always, once there are
    ranges. is_observing: True while extremes of the inputs are collected.
    """

    config: QuantizationAwareConfig
    model: Decoder
    is_on: bool = False
    is_observing: bool = False
    ranges: dict[str, Range] = field(default_factory=dict[str, Range])
    seen: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    """Extremes of the inputs in the present step, [2] each: minus the least, and the most."""

    def __post_init__(self) -> None:
        for name, projection in self.model.projections().items():
            self.config.weights.check(name, projection.in_features)
            self.ranges[name] = Range()
        if self.config.learned_steps and MODULE not in self.model.heads:
            text = "learned_steps: the model lacks steps to learn"
            raise ConfigError(f"{text}; train it with an objective that has them (`with_step_sizes`)")

    def wrap(self, name: str, product: Product) -> Product:
        """Wraps a product so that it rounds its factors, for `ModelPrecision.quantize`."""
        return partial(self._multiply, name, product)

    def _multiply(self, name: str, product: Product, x: Tensor, weight_OI: Tensor) -> Tensor:
        config = self.config
        if self.is_observing and self.model.training:
            values = x.detach()
            extremes = torch.stack([-values.amin(), values.amax()]) if x.numel() else x.new_full((2,), -math.inf)
            self.seen.setdefault(name, []).append(extremes.double())
        learned_G = None
        if config.learned_steps:
            steps = self.model.heads[MODULE]
            assert isinstance(steps, StepSizes)
            learned_G = steps.step(name)
        if not self.is_on and self.model.training:
            # Learned steps get gradients of zero before they are used, so that all ranks and steps treat them alike.
            return product(x, weight_OI + (0.0 if learned_G is None else 0.0 * learned_G.sum()))
        if config.activations == "token":
            x = round_tokens(x)
        elif config.has_observers and not (observed := self.ranges[name]).is_empty:
            step, zero = activation_range(observed.least, observed.most, x)
            x = fake_quantize(x, step, zero, -128, 127)
        step_G, zero_G = config.weights.ranges(weight_OI) if learned_G is None else (learned_G, None)
        zero_G = torch.zeros_like(step_G) if zero_G is None else zero_G
        return product(x, config.weights.rounded(weight_OI, step_G, zero_G))

    def collect(self, maxima: Callable[[Sequence[float]], Sequence[float]]) -> None:
        """Adds the extremes of this step to the ranges. maxima: returns the largest of each value over all ranks."""
        names = [name for name in self.ranges if name in self.seen]
        values = [float(value) for name in names for value in torch.stack(self.seen[name]).amax(dim=0)]
        largest = maxima(values) if values else ()
        # `seen` holds minus the least value, so that one maximum over ranks serves both ends.
        for name, low, most in zip(names, largest[::2], largest[1::2], strict=True):
            observed, least = self.ranges[name], -low
            if observed.is_empty:
                observed.least, observed.most, observed.is_empty = least, most, False
            elif self.config.activations == "tensor_moving_average":
                observed.least = MOVING * observed.least + (1 - MOVING) * least
                observed.most = MOVING * observed.most + (1 - MOVING) * most
            else:
                observed.least, observed.most = min(observed.least, least), max(observed.most, most)
        self.seen.clear()

    def state_dict(self) -> dict[str, Any]:
        return {name: [one.least, one.most] for name, one in self.ranges.items() if not one.is_empty}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, (least, most) in state.items():
            self.ranges[name] = Range(least=float(least), most=float(most), is_empty=False)


NEEDS = frozenset({WHOLE_LAYERS, EAGER_BLOCKS, TRAINED_WEIGHTS})
RANGES = "activation_ranges.json"
"""The file, in the folder of the stage, with the final range of each projection's inputs."""


def fake_quantization(config: QuantizationAwareConfig, run: Runtime) -> Technique:
    """Round the factors of all projections from `config.start_step` on."""
    rounding = FakeQuantization(config=config, model=run.model)
    run.formats.quantize(rounding.wrap)

    def on_batch(step: int, batch: Batch) -> Batch:
        if config.learned_steps and step in (0, config.start_step):
            # Learned steps start from the present weights; all ranks set the same values.
            parameters = dict(run.model.named_parameters())
            projections = {f"{name}.weight": name for name in run.model.projections()}
            for name, weight in whole_weights(run.model, run.mesh):
                if name in projections:
                    learned = parameters[f"heads.{MODULE}.{_key(projections[name])}"]
                    with torch.no_grad():
                        put(learned, torch.log2(lsq_step(weight, config.weights)).to(learned.dtype))
        rounding.is_on = step >= config.start_step
        rounding.is_observing = config.has_observers and not rounding.is_on
        rounding.seen.clear()  # of evaluation
        return batch

    def on_gradients(update: Update) -> None:
        if not update.skipped:  # all ranks skip alike, so all of them enter the collective or none
            rounding.collect(lambda values: run.mesh.world.maxima(*values))

    def on_step_end(info: StepInfo) -> None:
        if info.step == run.num_steps and run.is_first:
            write_atomic(run.folder / RANGES, json.dumps(rounding.state_dict()))

    return Technique(
        name="fake_quantization",
        on_batch=on_batch,
        on_gradients=on_gradients,
        on_step_end=on_step_end,
        on_retry=rounding.seen.clear,
        state=rounding,
        needs=NEEDS,
    )
