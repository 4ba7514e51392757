"""The progress of a run and its result, as values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelwright.core.rundir import StageDir
from modelwright.model.decoder import Decoder
from modelwright.train.checkpoint.files import Best, read_weights


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run. The model holds the last weights; `load_best` restores the best ones.

    loss: of the last step; heldout_loss: at the last evaluation, nan without held-out batches; heldout_metrics: the
    objective's figures at that evaluation; best: lowest held-out loss and its step (0: none); num_tokens: trained on,
    without padding; train_time_s: spent in steps, over all starts;
    model_flops: of forward and backward passes; mfu: in [0, 1], 0 without a peak rate; peak_flops: of one rank, the
    given one or that of the fastest step; bytes_sent: by this rank since this start, as in `StepInfo`; summaries: from
    techniques, by name.
    """

    num_steps: int
    loss: float
    heldout_loss: float
    best: Best
    num_tokens: int
    train_time_s: float
    model_flops: float
    mfu: float
    bytes_sent: int | None
    peak_flops: float = 0.0
    heldout_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    summaries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def summary_of(self, technique: str) -> Mapping[str, Any]:
        """The summary of a technique; empty if it was off."""
        return self.summaries.get(technique, {})


@dataclass
class TrainState:
    """The progress of the run: the part of a checkpoint besides tensors. `step`: updates done."""

    step: int = 0
    loss: float = math.nan
    num_tokens: int = 0
    train_time_s: float = 0.0
    model_flops: float = 0.0
    evaluated_step: int = 0
    heldout_loss: float = math.nan
    heldout_metrics: dict[str, float] = field(default_factory=dict[str, float])
    best_step: int = 0
    best_loss: float = math.inf


def load_best(model: Decoder, stage: StageDir, best: Best) -> None:
    """Load the weights with the lowest held-out loss into the model; the others are those of the base that its adapters
    belong to. Raises `ArtifactError` if they are gone.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    weights = read_weights(stage.checkpoints, best.step)
    # Checkpoints of a model with adapters lack its frozen base.
    lacking = set(model.state_dict()) - set(weights)
    assert lacking <= frozen, lacking
    model.load_state_dict({**{name: model.get_parameter(name) for name in lacking}, **weights})
