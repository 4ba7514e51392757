"""The runner: completes every stage of a run, skips finished ones, and keeps each one's journal and log.

A finished stage whose digest (settings, parents' contents, versions) is unchanged is skipped. An interrupted stage
keeps its folder and resumes from its checkpoints; a stage whose digest changed starts from an empty folder. Results of
an earlier invocation are verified against their manifest before they are used. The journal, `stage.json`, is written
before the stage's first byte, so that the folder of a killed process shows which settings it belongs to.
"""

import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from modelwright.core.artifacts import (
    ArtifactDraft,
    ArtifactError,
    Manifest,
    RunDir,
    StageDir,
    is_finished,
    read_attempts,
    read_manifest,
    read_stage_digest,
    write_artifact,
    write_atomic,
    writing,
)
from modelwright.core.config import STOPPING, ConfigError, ModelwrightError
from modelwright.core.progress import Progress
from modelwright.core.resources import ResourceUse
from modelwright.ops.tensor_heap import give_back_memory
from modelwright.pipeline.stage import Ranks, Stage, StageContext

LOG_EVERY_S = 5.0


@dataclass
class Attempt:
    """An attempt at a stage. `state`: running, done, stopped, failed, killed (found still running by the next
    attempt).
    """

    started: str
    ranks: int
    state: str = "running"
    error: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    child_peak_bytes: int = 0


def now() -> str:
    """Returns the current UTC time, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def begin_attempt(folder: StageDir, digest: str, ranks: int) -> Iterator[Attempt]:
    """Records the start of an attempt, and at its end the outcome and the resources used (this process, rank 0)."""
    # A process that is killed cannot write its end: an attempt that still counts as running has died.
    before = [entry | {"state": "killed"} if entry["state"] == "running" else entry for entry in read_attempts(folder)]
    attempt = Attempt(started=now(), ranks=ranks)
    _write(folder, digest, [*before, asdict(attempt)])
    use = ResourceUse()
    try:
        with use:
            yield attempt
        attempt.state = "done"
    except STOPPING:
        attempt.state = "stopped"
        raise
    except BaseException as error:
        attempt.state, attempt.error = "failed", str(error)
        raise
    finally:
        attempt.wall_s, attempt.cpu_s, attempt.peak_bytes = use.wall_s, use.cpu_s, use.peak_bytes
        # A full disk must not hide the failure that is being raised.
        with nullcontext() if attempt.state == "done" else suppress(OSError):
            _write(folder, digest, [*before, asdict(attempt)])


class StageLog:
    """A `Progress` that also writes `log.txt`: notes at once, the state of long work every few seconds."""

    def __init__(self, path: Path, shown: Progress, title: str) -> None:
        self._path, self._shown, self._title = path, shown, title
        self._file: IO[str] | None = None
        self._name = ""
        self._unit = ""
        self._total = 0.0
        self._last_line = 0.0

    def __enter__(self) -> "StageLog":
        with writing(self._path):
            self._file = open(self._path, "a", encoding="utf-8")
        self._line(f"{self._title}: begins")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._file is not None
        if error is None:
            self._line(f"{self._title}: done")
        elif isinstance(error, (ModelwrightError, *STOPPING)):
            self._line(f"{self._title}: {type(error).__name__}: {error}", must=False)
        else:
            self._line("".join(traceback.format_exception(error)), must=False)
        self._file.close()

    def begin(self, name: str, total: float, unit: str) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._last_line = time.monotonic()
        self._shown.begin(name, total, unit)

    def advance(self, done: float, **fields: float | str) -> None:
        if time.monotonic() - self._last_line >= LOG_EVERY_S:
            self._last_line = time.monotonic()
            texts = {key: f"{one:.5g}" if isinstance(one, float) else str(one) for key, one in fields.items()}
            shown = " ".join(f"{key}={text}" for key, text in texts.items())
            self._line(f"{self._name}: {done:.0f}/{self._total:.0f} {self._unit} {shown}".rstrip())
        self._shown.advance(done, **fields)

    def note(self, text: str) -> None:
        self._line(text)
        self._shown.note(text)

    def end(self) -> None:
        self._shown.end()

    def _line(self, text: str, *, must: bool = True) -> None:
        assert self._file is not None
        with nullcontext() if must else suppress(OSError), writing(self._path):
            self._file.write(f"{now()} {text}\n")
            self._file.flush()


def _write(folder: StageDir, digest: str, attempts: list[dict[str, Any]]) -> None:
    write_atomic(folder.path / "stage.json", json.dumps({"digest": digest, "attempts": attempts}, indent=1))


State = Literal["done", "begun", "changed", "new"]


@dataclass(frozen=True)
class Outcome:
    """Result of a stage: its `state` before the run, and `ran`, True if it was run."""

    stage: str
    state: State
    ran: bool


@dataclass
class Survey:
    """State of each stage of a run, and the content digests known so far."""

    states: dict[str, State] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)


def survey(run: RunDir, stages: Sequence[Stage]) -> Survey:
    """Returns the state of every stage, without changing anything. A stage below an unfinished one is never `done`.
    Raises `ArtifactError` if a file of a finished stage is missing or has another size; contents are not read.
    """
    result = Survey()
    for stage in stages:
        result.states[stage.name] = _state(run, stage, result.contents)
        if result.states[stage.name] == "done":
            result.contents[stage.name] = read_manifest(run.stage(stage.name).artifact).content_digest
    return result


def run_stages(
    run: RunDir,
    stages: Sequence[Stage],
    *,
    ranks: Ranks,
    progress: Progress,
    only: Sequence[str] = (),
    restart: bool = False,
    after_stage: Callable[[Stage, Manifest], None] = lambda stage, manifest: None,
) -> list[Outcome]:
    """Completes `stages` (in order, parents first).

    `only`: names of the stages that may run now (empty: all); the others must be finished with the present settings,
    else `ConfigError`. `restart`: as in `StageContext`. `after_stage` is called for every finished stage, including
    skipped ones, on rank 0. Errors of a stage propagate; earlier stages remain finished. Raises `ArtifactError` for a
    damaged file of a finished stage: repeating the stage may take days, so a person decides by removing the file.
    """
    contents: dict[str, str] = {}
    outcomes = []
    for stage in stages:
        ranks.barrier()
        # Hashing all files takes minutes for a large artifact; one rank does it for all.
        state = _state(run, stage, contents, verify=ranks.rank == 0)
        ranks.barrier()  # nobody writes before everybody has looked
        allowed = not only or stage.name in only
        if not allowed and state != "done":
            if any(stage.name in other.parents for other in stages if other.name in only):
                why = {"new": "was never run", "begun": "was cut off", "changed": "was made with other settings"}[state]
                raise ConfigError(f"stages: {stage.name} {why} and is needed; add {stage.name} to --stages")
            continue
        if state != "done":
            _work(run, stage, stage.digest(contents), contents, ranks, progress, restart=restart)
            give_back_memory()  # the next stage begins without the freed memory of this one
            ranks.barrier()
        manifest = read_manifest(run.stage(stage.name).artifact, kind=stage.name)
        contents[stage.name] = manifest.content_digest
        outcomes.append(Outcome(stage.name, state, state != "done"))
        if ranks.rank == 0:
            after_stage(stage, manifest)
    return outcomes


def _state(run: RunDir, stage: Stage, contents: Mapping[str, str], *, verify: bool = False) -> State:
    """Returns the state of a stage. `verify`: read the files of a finished one and compare their SHA-256."""
    is_known = contents.keys() >= set(stage.parents)
    digest = stage.digest(contents) if is_known else ""
    folder = run.stage(stage.name)
    if not folder.path.exists():
        return "new"
    if not is_known:
        return "changed"
    begun = read_stage_digest(folder) == digest
    if is_finished(folder.artifact):
        try:
            if read_manifest(folder.artifact, kind=stage.name).digest == digest:
                read_manifest(folder.artifact, verify=verify)
                return "done"
        except ArtifactError:
            # With other settings the stage is made again anyway; with these, a damaged result is an error.
            if begun:
                raise
    return "begun" if begun else "changed"


def _work(
    run: RunDir,
    stage: Stage,
    digest: str,
    contents: Mapping[str, str],
    ranks: Ranks,
    progress: Progress,
    *,
    restart: bool,
) -> None:
    folder = run.stage(stage.name)
    first = ranks.rank == 0
    if first and read_stage_digest(folder) != digest:
        # Checkpoints and logs of other settings: nothing in the folder may be used.
        shutil.rmtree(folder.path, ignore_errors=True)
    if first:
        with writing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
    if stage.every_rank:
        ranks.barrier()
    elif not first:
        return
    inputs = {name: contents[name] for name in stage.parents}
    parents = {name: run.stage(name).artifact for name in stage.parents}

    context = partial(StageContext, folder=folder, parents=parents, digest=digest, ranks=ranks, restart=restart)
    if not first:
        stage.run(context(output=ArtifactDraft(folder.artifact), progress=progress))
        return
    with (
        begin_attempt(folder, digest, ranks.size) as attempt,
        StageLog(folder.log, progress, stage.title) as log,
        write_artifact(folder.artifact, kind=stage.name, digest=digest, inputs=inputs) as draft,
    ):
        stage.run(context(output=draft, progress=log))
        attempt.child_peak_bytes = int(draft.facts.get("child_peak_bytes", 0))
