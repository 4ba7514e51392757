"""`MetricSink`: takes the numbers of a training to TensorBoard or to a tracker; `SINKS` is the only list of them. Each
sink runs in its own thread, so that no training waits for a sink or ends with it.
"""

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from modelwright.core.config import ConfigError, flatten, install_line, is_installed
from modelwright.core.texts import redact_text


@dataclass(frozen=True, kw_only=True)
class SinkStart:
    """Facts about a training for a sink. A process that resumes a training opens its sinks anew. run, name: names of
    the run and of the stage; folder: of the stage, for local files; first_step: first step of this process; settings:
    flat, without secrets.
    """

    run: str
    name: str
    folder: Path
    first_step: int = 0
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


class MetricSink(Protocol):
    """An open sink. It may fail and be slow: `QueuedSink` keeps that from the training."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step; they may be infinite or NaN."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """A kind of sink. package: the package that it imports; extra: the extra of this project that installs it; "" for
    none.
    """

    name: str
    open: Callable[[SinkStart], MetricSink]
    package: str = ""
    extra: str = ""


def flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings by dotted names, each value as text."""
    return {name: str(value) for name, value in flatten(settings)}


MAX_WAITING = 10_000
"""Records in the queue of a slow sink; further ones are left out and counted."""
CLOSE_TIMEOUT_S = 30.0
"""Longest time that the end of a training waits for a sink to take the rest of its records."""
_Record = tuple[int, Mapping[str, float]]


class QueuedSink:
    """Opens, fills and closes a sink in a thread. An exception of the sink becomes one note, after which it gets no
    more records; records that it would not take in time are counted. Notes are shown by the thread that trains.
    """

    def __init__(self, spec: SinkSpec, start: SinkStart, note: Callable[[str], None]) -> None:
        self._spec, self._start, self._note = spec, start, note
        self._waiting: queue.Queue[_Record | None] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0
        self._failure, self._is_told = "", False
        # A daemon, so that a sink that never returns cannot keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"sink {spec.name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._has_failed():
            return
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Wait for the rest of the records, at most `CLOSE_TIMEOUT_S`."""
        with contextlib.suppress(queue.Full):
            # One deadline for both waits: for room in the queue, and for the thread.
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._has_failed():
            return
        if self._thread.is_alive():
            self._note(f"{self._spec.name}: does not answer; metrics.jsonl has what it lacks")
        elif self._num_dropped:
            self._note(f"{self._spec.name}: was too slow for {self._num_dropped:,} records; metrics.jsonl has them")

    def _has_failed(self) -> bool:
        if self._failure and not self._is_told:
            self._is_told = True
            self._note(f"{self._spec.name}: failed and gets nothing more ({self._failure}); metrics.jsonl has it all")
        return bool(self._failure)

    def _work(self) -> None:
        try:
            sink = self._spec.open(self._start)
            while (record := self._waiting.get()) is not None:
                sink.write(*record)
            sink.close()
        except Exception as error:  # whatever a foreign library raises: a training is worth more than its picture
            first_line = str(error).partition("\n")[0]
            self._failure = f"{type(error).__name__}: {redact_text(first_line)}"  # some name a URL with its password
            while not self._waiting.empty():  # so that `close` finds room for its mark
                self._waiting.get_nowait()


class TensorBoardSink:
    """Writes one event for all numbers of a step: `SummaryWriter`'s one for each takes ten times as long."""

    def __init__(self, start: SinkStart) -> None:
        from tensorboardX import FileWriter  # pyright: ignore[reportMissingTypeStubs]
        from tensorboardX.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingTypeStubs]

        events: Any = event_pb2
        self._messages: Any = summary_pb2
        self._writer: Any = FileWriter(str(start.folder / "tensorboard"), flush_secs=20)
        # The purge event: TensorBoard ignores what older files have of this step and later ones.
        purge = events.Event(session_log=events.SessionLog(status=events.SessionLog.START))
        self._writer.add_event(purge, start.first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        numbers = [self._messages.Summary.Value(tag=name, simple_value=one) for name, one in values.items()]
        self._writer.add_summary(self._messages.Summary(value=numbers), step)

    def close(self) -> None:
        self._writer.close()


TENSORBOARD = SinkSpec(name="tensorboard", open=TensorBoardSink)


_PARAMS_PER_CALL = 100  # the most that MLflow's API takes
_REFUSED = re.compile(r"[^\w.\- :/]|(?<=/)/|^/|/$|(?<![^/])\.+(?![^/])", re.ASCII)
"""Parts of a name that MLflow refuses: other characters, and parts of a path that normalization would remove."""


class MlflowSink:
    """Writes one run of MLflow for each process that trains, with the tag `first_step`."""

    def __init__(self, start: SinkStart) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # or it reports its use to its makers
        from mlflow import MlflowClient, entities

        local = f"sqlite:///{start.folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or local)
        self._metric = entities.Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "modelwright"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        tags = {"run": start.run, "stage": start.name, "first_step": start.first_step}
        self._run = self._client.create_run(experiment, tags=tags, run_name=f"{start.run}/{start.name}").info.run_id
        params = [entities.Param(accepted(name), value) for name, value in start.settings.items()]
        for place in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run, params=params[place : place + _PARAMS_PER_CALL])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(accepted(name), one, now, step) for name, one in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def accepted(name: str) -> str:
    """The name, which may be a user's, with `_` and the hexadecimal code for each character that MLflow refuses."""
    return _REFUSED.sub(lambda found: "".join(f"_{ord(one):x}" for one in found[0]), name)


MLFLOW = SinkSpec(name="mlflow", open=MlflowSink, package="mlflow", extra="mlflow")


PROJECT = "modelwright"


class WandbSink:
    """Writes one run of Weights & Biases for each process that trains, in a group named after the run."""

    def __init__(self, start: SinkStart) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its makers, with what the process was doing
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            group=start.run,
            name=f"{start.run}/{start.name}",
            config={**start.settings, "first_step": start.first_step},
            dir=str(start.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",  # type: ignore[arg-type]
            reinit="create_new",
            settings=wandb.Settings(
                console="off", save_code=False, disable_git=True, silent=True, disable_job_creation=True,
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            ),
        )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


WANDB = SinkSpec(name="wandb", open=WandbSink, package="wandb", extra="wandb")


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
        if not is_installed("tensorboard"):
            note(f"tensorboard: gets nothing; {install_line('tensorboard')} (metrics.jsonl has it all)")
            names -= {TENSORBOARD.name}
        return [QueuedSink(spec, start, note) for spec in SINKS if spec.name in names]
