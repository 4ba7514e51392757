"""All sinks. This is the only list of them: a new one is a file in this folder and a line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modelwright.core.errors import ConfigError
from modelwright.core.sinks.mlflow import MLFLOW
from modelwright.core.sinks.sink import MetricSink, QueuedSink, SinkSpec, SinkStart, flat
from modelwright.core.sinks.tensorboard import TENSORBOARD
from modelwright.core.sinks.wandb import WANDB

SINKS: tuple[SinkSpec, ...] = (TENSORBOARD, MLFLOW, WANDB)
ALWAYS = (TENSORBOARD.name,)
"""Sinks that every training has."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Experiment trackers that get the numbers of every training in addition to TensorBoard."""

    report_to: tuple[str, ...] = ()
    """`mlflow`: the server of MLFLOW_TRACKING_URI, else a SQLite file in the stage's folder; `wandb` (Weights &
    Biases): files in the stage's folder, or its server with WANDB_MODE=online. They get numbers and settings, no texts
    and no command line; one that fails never stops a training."""

    def __post_init__(self) -> None:
        known = [spec.name for spec in SINKS if spec.name not in ALWAYS]
        for name in self.report_to:
            if name not in known:
                raise ConfigError(f"report_to: {name!r} is not one of {', '.join(known)}")


def require_packages(config: TrackingConfig) -> None:
    """Raise `ConfigError` if a sink's package is not installed, before anything is trained."""
    for spec in SINKS:
        if spec.name in config.report_to and spec.package and find_spec(spec.package) is None:
            raise ConfigError(
                f"tracking.report_to: {spec.name} needs the package {spec.package}: pip install "
                f"'modelwright[{spec.extra}]', or leave {spec.name} out"
            )


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Settings of a training's sinks. report_to: trackers in addition to TensorBoard; run: name of the run; settings:
    nested and without secrets.
    """

    report_to: tuple[str, ...] = ()
    run: str = "run"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def open(self, folder: Path, name: str, first_step: int, note: Callable[[str], None]) -> list[MetricSink]:
        """Open the sinks of the training `name` in `folder`, each in its own thread."""
        settings = flat(self.settings)
        start = SinkStart(run=self.run, name=name, folder=folder, first_step=first_step, settings=settings)
        names = {*ALWAYS, *self.report_to}
        return [QueuedSink(spec, start, note) for spec in SINKS if spec.name in names]
