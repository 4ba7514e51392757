"""`Runtime`: the parts of a run under one layout, passed to the builders of techniques."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.model.decoder import Decoder
from modelwright.ops.tensor_view import TensorView
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.strategy import Replica, Strategy
from modelwright.train.monitors.anomalies import AnomalyLog
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.loss_scale import LossScaler, NoLossScaler
from modelwright.train.runner import Executor, Runner
from modelwright.train.technique import StepInfo, Technique


@dataclass(kw_only=True)
class Runtime:
    """The parts of a run that a builder of a technique may use. It may replace `runner` and `scaler`.

    The strategy is chosen after all techniques are built, because it follows from what they need: `strategy` is for
    their hooks, not for their builders.
    """

    replica: Replica
    executor: Executor
    runner: Runner
    formats: ModelPrecision
    scaler: LossScaler = field(default_factory=NoLossScaler)
    """Scales losses and unscales gradients."""
    global_mesh: Mesh
    microbatch_tokens: int
    """Tokens of one microbatch on one rank."""
    num_steps: int
    seed: int
    folder: Path
    """The folder of the stage."""
    note: Callable[[str], None]
    """Shows a line to the user."""
    anomalies: AnomalyLog | None
    """The list of events that a person should look at; on the first rank only, and None for a step that is traced."""
    alive: Callable[[], None]
    """Resets the watchdog's timer; for techniques that work for long between two steps."""
    on_exit: ExitStack
    """Closed when the run under this layout ends, also after an error."""
    chosen: list[Strategy] = field(default_factory=list[Strategy])
    """Holds the strategy, once it is chosen."""

    @property
    def strategy(self) -> Strategy:
        assert self.chosen, (
            "a builder used the strategy, which is chosen after all techniques are built; use it in hooks"
        )
        return self.chosen[0]

    @property
    def model(self) -> Decoder:
        """This rank's part of the model."""
        return self.executor.model

    @property
    def mesh(self) -> Mesh:
        """The processes that make one update together."""
        return self.replica.mesh

    @property
    def world(self) -> World:
        """All processes."""
        return self.global_mesh.world

    @property
    def is_first(self) -> bool:
        """True for the first of the processes that make one update together."""
        return self.mesh.world.is_first

    def parameters(self) -> list[TensorView]:
        """Returns this rank's part of every trained weight, with its present values. Under a pipeline each rank has
        those of its stages; ranks that hold the same part hold the same values, unless `EQUAL_REPLICAS` is broken.
        """
        return self.replica.parameters()

    def max_over_ranks(self, value: float) -> float:
        """The maximum over the processes that make one update together."""
        return self.mesh.world.maxima(value)[0]

    def report(self, step: int, kind: str, value: float, limit: float, text: str) -> None:
        """Record an event that a person should look at; only the first rank does."""
        if self.anomalies is not None:
            self.anomalies.report(step, kind, value, limit, text)


TechniqueBuilder = Callable[[Runtime], Technique | None]
"""Builds a technique for one layout; None where it has nothing to do. Called on all ranks alike, and again whenever a
run is laid out anew."""


def observer(name: str, observe: Callable[[StepInfo], None]) -> TechniqueBuilder:
    """Returns the builder of a technique that only observes finished steps and has no state."""
    return lambda run: Technique(name=name, on_step_end=observe, needs=frozenset())
