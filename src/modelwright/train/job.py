"""`TrainJob`: a training to be run. `Session`, `StepParts`: a running one. `TrainState`, `TrainResult`: its course."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import StageDir
from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.sinks import Tracking
from modelwright.model.decoder import Decoder
from modelwright.parallel.gradient_sync import GradientSync
from modelwright.parallel.mesh import ParallelConfig, World
from modelwright.parallel.strategies.config import StrategyConfig, build_strategy
from modelwright.parallel.strategy import AllReduce, Replica, Strategy
from modelwright.train.checkpoint.files import Best, read_weights
from modelwright.train.config import TrainConfig
from modelwright.train.interruption import StopRequest, Watchdog
from modelwright.train.memory.offload import Store
from modelwright.train.monitors.anomalies import AnomalyLog
from modelwright.train.objective import Batch, Objective
from modelwright.train.optim.build import compensate
from modelwright.train.step import TrainStep
from modelwright.train.technique import Runtime, StepInfo, Technique, TechniqueBuilder

StrategyFactory = Callable[[StrategyConfig, Replica, World], Strategy]
"""Builds the strategy of one rank from its configuration; called on all ranks of the world alike."""


def configured_strategy(config: StrategyConfig, replica: Replica, world: World) -> Strategy:
    """The strategy that the configuration describes."""
    strength = config.asynchronous.delay_compensation
    return build_strategy(
        config,
        replica,
        world,
        compensate=partial(compensate, strength=strength) if strength else None,
        encode=StepInfo.as_json,
        decode=lambda values: StepInfo(**values),
    )


def all_reduce_by(sync: GradientSync) -> StrategyFactory:
    """Returns a factory of strategies that sum gradients by this sync, whatever is configured: for gradient probes."""
    return lambda config, replica, world: AllReduce(replica, sync, unscale_first=True)


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A training: its model, data, settings and folder."""

    model: Decoder
    """The whole model, with the weights to start from; trained in place."""
    objective: Objective
    config: TrainConfig
    stage: StageDir
    """The folder of checkpoints, metrics and logs. A job resumes from the newest intact checkpoint in it."""
    num_steps: int
    """Updates until the end, from `config.resolve_num_steps`."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout over the processes of the world."""
    seed: int = 0
    """Seed of everything random within a step."""
    name: str = "training"
    """The name in the progress display."""
    input_digest: str = ""
    """Digest of all that determines the result (config, data, initial weights); other checkpoints are refused."""
    heldout: Sequence[Batch] = ()
    """Batches for evaluation, shared among the ranks."""
    old_rows: Sequence[Batch] = ()
    """Rows of older tasks, for techniques that keep the model from forgetting them."""
    peak_flops: float = 0.0
    """Matrix-product rate of one rank in FLOP/s; 0: unknown."""
    techniques: Sequence[TechniqueBuilder] = ()
    """Further techniques. They act after the built-in ones."""
    restart: bool = False
    """Start over at step 0 when all checkpoints are damaged, which is an error otherwise."""
    is_resumable: bool = True
    """True to write checkpoints. A training without them starts over after a kill."""
    measure_grad_norm: bool = True
    """False to take 1 for the gradient norm: in a trace on fake tensors, which have no values."""
    tracking: Tracking = field(default_factory=Tracking)
    """Experiment trackers that get the numbers of the training, and its description for them."""
    strategy: StrategyFactory = configured_strategy
    """Factory of the strategy, by which ranks share gradients and updates; gradient probes replace it."""


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


@dataclass(frozen=True, kw_only=True)
class Session:
    """The objects of a running training that outlive its layouts."""

    world: World
    progress: Progress
    stop: StopRequest
    watchdog: Watchdog
    anomalies: AnomalyLog | None
    """The list of events that a person should look at; on the first rank only."""
    store: Store | None
    """Storage of offloaded activations; None if they are not offloaded."""
    note: Callable[[str], None]
    """Shows a line to the user; each text once, although a run may be laid out several times."""

    @classmethod
    def untracked(cls, world: World, store: Store | None) -> "Session":
        """A session without display, signals and files, for tracing a step."""
        return cls(
            world=world,
            progress=SilentProgress(),
            stop=StopRequest(),
            watchdog=Watchdog(Path(os.devnull), limit_s=0.0),
            anomalies=None,
            store=store,
            note=SilentProgress().note,
        )


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A training step under one layout, with its runtime and techniques."""

    one_step: TrainStep
    run: Runtime
    techniques: Sequence[Technique]
    """All of them, in the order in which they act."""
