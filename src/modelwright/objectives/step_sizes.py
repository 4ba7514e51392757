"""Adds the learned steps of quantization-aware training to what an objective trains."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.ops.int_grid import WeightGrid
from modelwright.precision.quantization_aware import MODULE, StepSizes, projection_shapes
from modelwright.train.objective import Objective, Terms


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
