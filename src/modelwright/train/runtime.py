"""`Runtime`: the parts of a run under one layout, passed to the builders of techniques."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.strategy import Replica, Strategy
from modelwright.precision.apply import ModelPrecision
from modelwright.train.runner import Executor, Runner
from modelwright.train.technique import Technique

Report = Callable[[int, str, float, float, str], None]
"""Takes step, kind, value, limit and text of an event that a person should look at."""


def ignore_event(step: int, kind: str, value: float, limit: float, text: str) -> None:
    """A `Report` that discards everything."""


@dataclass(kw_only=True)
class Runtime:
    """What the builder of a technique may use. world: all processes; `mesh` has those that make one update together.
    folder: of the stage. note: shows a line to the user. report: records an event; only the first rank does. on_exit:
    closed when the run under this layout ends, also after an error.
    """

    replica: Replica
    strategy: Strategy
    executor: Executor
    runner: Runner
    formats: ModelPrecision
    global_mesh: Mesh
    num_steps: int
    seed: int
    folder: Path
    note: Callable[[str], None]
    report: Report
    on_exit: ExitStack = field(default_factory=ExitStack)

    @property
    def model(self) -> Decoder:
        """This rank's part of the model."""
        return self.executor.model

    @property
    def mesh(self) -> Mesh:
        return self.strategy.mesh

    @property
    def world(self) -> World:
        return self.global_mesh.world

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the processes that make one update together."""
        return self.mesh.world.is_first

    def max_over_ranks(self, value: float) -> float:
        """Sum over the processes that make one update together."""
        return self.mesh.world.maxima(value)[0]


TechniqueBuilder = Callable[[Runtime], Technique | None]
"""Builds a technique for one layout; None where it has nothing to do."""
