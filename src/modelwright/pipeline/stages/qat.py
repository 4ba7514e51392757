"""qat: quantization-aware training of the final model on the grid of integer inference. Artifact: the model with its
tokenizer in the Hugging Face layout, and the grid, which the stage quantize uses exactly.

With learned steps, these are trained as parameters together with those of an objective.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from modelwright.compress.fold import fold_norms
from modelwright.compress.int8 import TrainedGrid
from modelwright.core.config import ConfigError
from modelwright.objectives.next_token import NextToken
from modelwright.ops.int_grid import Granularity, WeightGrid
from modelwright.pipeline.stages.pack import PACK, needed_start
from modelwright.pipeline.stages.rows import ALL_ROWS
from modelwright.pipeline.stages.training import TrainedModel, save_language_model, training_spec
from modelwright.train.config import TrainConfig
from modelwright.train.techniques import fake_quantization


def with_step_sizes(objective: NextToken, grid: WeightGrid) -> NextToken:
    """Returns the objective with a step for each group of weights as a parameter of the model."""
    return replace(
        objective,
        further_modules=lambda config: {
            fake_quantization.MODULE: fake_quantization.StepSizes(fake_quantization.projection_shapes(config), grid)
        },
    )


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
    activations: fake_quantization.Activations = "token"
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

    def quantization(self) -> fake_quantization.QuantizationAwareConfig:
        """Returns the grids. Raises `ConfigError` for settings that cannot be combined."""
        grid = WeightGrid(
            bits=8 if self.weights == "int8" else 4, symmetric=not self.asymmetric, granularity=self.granularity
        )
        return fake_quantization.QuantizationAwareConfig(
            weights=grid, activations=self.activations, learned_steps=self.learned_steps, start_step=self.start_step
        )


def _save(trained: TrainedModel) -> Mapping[str, Any]:
    """Writes the grid next to the weights."""
    save_language_model(trained)
    section: QatConfig = trained.config.section(QAT)
    model, settings = trained.model, section.quantization()
    # Learned steps are parameters; without them the steps follow from the weights themselves.
    steps: dict[str, Tensor] = {}
    if settings.learned_steps:
        learned = model.heads[fake_quantization.MODULE]
        assert isinstance(learned, fake_quantization.StepSizes)
        steps = {name: learned.step(name) for name in model.projections()}
    activations: Literal["none", "token", "tensor"] = "token" if settings.activations == "token" else "none"
    if settings.activations.startswith("tensor"):
        activations = "tensor"
    ranges = json.loads((trained.context.folder.path / fake_quantization.RANGES).read_text(encoding="utf-8"))
    TrainedGrid(
        weights=settings.weights,
        activations=activations,
        steps=steps,
        ranges={name: (float(least), float(most)) for name, (least, most) in ranges.items()},
    ).save(trained.folder)
    return {}


QAT = training_spec(
    name="qat",
    title="Training on the grid of integer inference",
    report_title="Quantization-aware training",
    model_title="quantization-aware model",
    objective=lambda inputs: (
        with_step_sizes(NextToken(inputs.loader), inputs.training.quantization().weights)
        if inputs.training.learned_steps
        else NextToken(inputs.loader)
    ),
    rows=ALL_ROWS,
    run_needs=NextToken.needs | fake_quantization.NEEDS,
    needs=lambda config: (PACK.name, *needed_start(config, "qat")),
    config=QatConfig,
    only_if_named=True,
    techniques=lambda inputs: [
        partial(fake_quantization.fake_quantization, inputs.config.section("qat").quantization())
    ],
    save=_save,
    prepare=lambda config, model: fold_norms(model) if config.section("qat").fold_norms else None,
)
