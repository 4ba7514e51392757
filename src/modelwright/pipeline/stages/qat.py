"""qat: quantization-aware training of the final model on the grid of integer inference. Artifact: the model with its
tokenizer in the Hugging Face layout, and the grid, which the stage quantize uses exactly.

With learned steps, these are trained as parameters together with those of an objective.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from modelwright.compress.fold import fold_norms
from modelwright.compress.int8 import TrainedGrid
from modelwright.core.errors import ConfigError
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.ops.int_grid import Granularity, WeightGrid
from modelwright.pipeline.stage import StageInputs
from modelwright.pipeline.stages.pack import PACK
from modelwright.pipeline.stages.rows import ALL_ROWS
from modelwright.pipeline.stages.stage_inputs import needed_start
from modelwright.pipeline.stages.training import TrainedModel, save_language_model, training_spec
from modelwright.train.config import TrainConfig
from modelwright.train.objective import Objective, Terms
from modelwright.train.techniques.fake_quantization import (
    MODULE,
    NEEDS,
    RANGES,
    Activations,
    QuantizationAwareConfig,
    StepSizes,
    fake_quantization,
    projection_shapes,
)


@dataclass(kw_only=True)
class WithStepSizes(Objective):
    """The objective `inner`, and a step for each group of weights as a parameter of the model."""

    inner: Objective
    grid: WeightGrid
    needs: frozenset[str] = field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    metric_names: Sequence[str] = field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        self.needs, self.metric_names = self.inner.needs, self.inner.metric_names

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        return {**self.inner.own_modules(config), MODULE: StepSizes(projection_shapes(config), self.grid)}

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return self.inner.batches(model, first=first, rank=rank, world_size=world_size)

    def prepare(self, batch: TokenBatch, model: Decoder) -> TokenBatch:
        return self.inner.prepare(batch, model)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return self.inner.weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        return self.inner.losses(output, batch, model)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class QatConfig(TrainConfig):
    """Quantization-aware training of the decoder's linear layers; embedding, head and norms are not quantized."""

    weights: Literal["int8", "int4"] = "int4"
    """Format of the weights."""
    asymmetric: bool = False
    """Give each group of weights a zero point in addition to its step."""
    granularity: Granularity = "group_32"
    """Weights that share a step: the whole matrix, an output channel, or a number of neighboring inputs of a
    channel."""
    activations: Activations = "token"
    """`token` quantizes each token by its largest magnitude at run time; `tensor_min_max` and `tensor_moving_average`
    by one range for all tokens, observed in the steps before `start_step`; `none` leaves activations alone."""
    learned_steps: bool = False
    """Train the steps of the weights, too (LSQ, Esser et al. 2020); otherwise they span each group."""
    start_step: int = 0
    """Step from which weights and activations are rounded."""
    fold_norms: bool = False
    """Multiply the weights of the norms before projections into these first, and train on from neutral ones; the model
    computes the same at the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.quantization()
        if self.num_steps and self.start_step >= self.num_steps:
            raise ConfigError(f"start_step: {self.start_step} is not before the last of {self.num_steps} steps")

    def quantization(self) -> QuantizationAwareConfig:
        """Returns the grids. Raises `ConfigError` for settings that cannot be combined."""
        grid = WeightGrid(
            bits=8 if self.weights == "int8" else 4, symmetric=not self.asymmetric, granularity=self.granularity
        )
        return QuantizationAwareConfig(
            weights=grid, activations=self.activations, learned_steps=self.learned_steps, start_step=self.start_step
        )


def _objective(inputs: StageInputs) -> Objective:
    config: QatConfig = inputs.training
    objective = NextToken(inputs.loader)
    if not config.learned_steps:
        return objective
    return WithStepSizes(inner=objective, grid=config.quantization().weights)


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    """Writes the grid next to the weights."""
    save_language_model(trained)
    section: QatConfig = trained.config.section(QAT)
    model, settings = trained.model, section.quantization()
    # Learned steps are parameters; without them the steps follow from the weights themselves.
    steps = model.heads[MODULE] if settings.learned_steps else None
    names = list(model.projections()) if isinstance(steps, StepSizes) else []
    activations: Literal["none", "token", "tensor"] = "token" if settings.activations == "token" else "none"
    if settings.activations.startswith("tensor"):
        activations = "tensor"
    ranges = json.loads((trained.context.folder.path / RANGES).read_text(encoding="utf-8"))
    TrainedGrid(
        weights=settings.weights,
        activations=activations,
        steps={name: steps.step(name) for name in names if isinstance(steps, StepSizes)},
        ranges={name: (float(least), float(most)) for name, (least, most) in ranges.items()},
    ).save(trained.folder)
    return {}


QAT = training_spec(
    name="qat",
    title="Training on the grid of integer inference",
    report_title="Quantization-aware training",
    model_title="quantization-aware model",
    objective=_objective,
    rows=ALL_ROWS,
    run_needs=NextToken.needs | NEEDS,
    needs=lambda config: (PACK.name, *needed_start(config, "qat")),
    config=QatConfig,
    only_if_named=True,
    techniques=lambda inputs: [partial(fake_quantization, inputs.config.section("qat").quantization())],
    save=_save,
    prepare=lambda config, model: fold_norms(model) if config.section("qat").fold_norms else None,
)
