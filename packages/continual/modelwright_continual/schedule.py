"""Updates on a schedule: at each due time the loop runs on the texts that have arrived since, if requests have drifted
or, without a drift reference, unconditionally.

The state is one file. It names the update in progress before anything else happens, so a process that was killed
resumes that update; a lock keeps a second scheduler out of the folder. Every text belongs to one update: those that no
earlier update had are copied into the update's folder, because sources may grow in the meantime. Every window of
requests is compared once (`schedule_drift.py`).
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from modelwright.core.artifacts import (
    ArtifactError,
    RunDir,
    is_finished,
    lock_folder,
    make_folder,
    read_manifest,
    write_artifact,
    write_atomic,
)
from modelwright.core.config import ConfigError, ModelwrightError, Stopped
from modelwright.core.progress import Progress
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright_continual.loop import LoopRequest, LoopResult, run_loop
from modelwright_continual.schedule_drift import DriftState, ScheduledDrift

STATE = "schedule.json"
TEXTS, TEXTS_FILE, SEEN_FILE = "new-texts", "new.jsonl", "seen.txt"
HOUR_S = 3600.0
_NAP_S = 30.0
"""Longest sleep, so that a change of the system clock is noticed soon."""


@dataclass(frozen=True, kw_only=True)
class UpdateSchedule:
    """Settings of a schedule. every_s: seconds between two checks; min_new: minimum number of new texts for an update;
    checks: number of checks after which the schedule ends, 0 for no end.
    """

    every_s: float
    min_new: int = 1
    checks: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.every_s < math.inf:
            raise ConfigError(f"--schedule: must be hours above 0, got {self.every_s / HOUR_S:g}; 24 is once a day")
        if self.min_new < 1 or self.checks < 0:
            raise ConfigError("--min-new: must be at least 1, and --checks 0 (no end) or more")


@dataclass(frozen=True, kw_only=True)
class ScheduleState:
    """State of a schedule. due: Unix time of the next check; checks: number of checks that have begun; update: number
    of the newest update; is_open: whether that update is in progress; model: model that the next update begins with;
    drift: requests that were compared so far; history: outcome of each check.
    """

    due: float
    model: str
    checks: int = 0
    update: int = 1
    is_open: bool = False
    drift: DriftState = field(default_factory=DriftState)
    history: Sequence[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def write(self, folder: Path) -> None:
        write_atomic(folder / STATE, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> "ScheduleState | None":
        """Reads the state; None if the folder is new. Raises `ArtifactError` if the file is damaged."""
        path = folder / STATE
        if not path.exists():
            return None
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            return cls(**plain | {"drift": DriftState(**plain.get("drift", {}))})
        except (ValueError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path}: is damaged ({error}); choose another --run-dir") from None


@dataclass(frozen=True, kw_only=True)
class UpdateScheduler:
    """Runs updates on a schedule. request: template of the updates; its run is the folder of the schedule, and the
    first update begins with its `update.model`. clock, sleep: for tests.

    Raises `ConfigError` for a request that only the first update could fulfill.
    """

    request: LoopRequest
    config: UpdateSchedule
    words: Sequence[str]
    progress: Progress
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        champion, current = self.request.champion, self.request.current
        if champion is not None and (current is None or champion.absolute() != current.absolute()):
            raise ConfigError(
                f"--champion: {champion} would be compared with later updates, too, when another model is in service; "
                "give the link of --current, or leave it out"
            )
        if self.request.floor:
            raise ConfigError(
                "--floor: only the first of scheduled updates begins with a model that was trained from scratch; leave "
                "it out, or make a single update without --schedule"
            )

    @property
    def folder(self) -> Path:
        return self.request.run.path

    def run(self) -> ScheduleState:
        """Runs checks until the last one and returns the state. Raises `Stopped`, and `ModelwrightError` if another
        scheduler works in the folder.
        """
        self.request.run.create()
        with lock_folder(self.folder, "this schedule; one is enough"):
            state = ScheduleState.read(self.folder) or ScheduleState(
                due=self.clock(), model=str(self.request.update.model.resolve())
            )
            while state.is_open or not self.config.checks or state.checks < self.config.checks:
                if not state.is_open:
                    state = self._waited(state)
                    # Written before the check starts: a killed process then resumes this check instead of starting
                    # another one.
                    state = replace(state, is_open=True, checks=state.checks + 1, due=self._next_due(state.due))
                    state.write(self.folder)
                state = self._checked(state)
                state.write(self.folder)
            return state

    def _waited(self, state: ScheduleState) -> ScheduleState:
        """Waits until the check of a state is due. A check is never further ahead than the interval: if it is, the
        clock was set back or the interval was shortened.
        """
        if state.due > self.clock():
            due = min(state.due, self.clock() + self.config.every_s)
            self.progress.note(f"schedule: next check at {time.strftime('%F %T', time.localtime(due))}")
        while (left := state.due - self.clock()) > 0:
            if left > self.config.every_s:
                state = replace(state, due=self.clock() + self.config.every_s)
            self.sleep(min(left, self.config.every_s, _NAP_S))
        return state

    def _next_due(self, due: float) -> float:
        """Returns the schedule's next time in the future: checks that were missed are made up for by a single one."""
        missed = max(0.0, self.clock() - due)
        return due + (math.floor(missed / self.config.every_s) + 1) * self.config.every_s

    def _checked(self, state: ScheduleState) -> ScheduleState:
        """Runs the open check and returns the state after it. An error that a person has to fix is noted, and the same
        update is retried when the next check is due.
        """
        run = RunDir(self.folder / f"{state.update:04d}")
        try:
            # An update whose texts were kept resumes without another drift check.
            if not is_finished(run.path / TEXTS):
                state, outcome = self._watched(state, run)
                if outcome == "drift" and not self._keep_new_texts(run.path / TEXTS, state.update):
                    outcome = "nothing_new"
                if outcome != "drift":
                    return self._closed(state, {"ending": outcome})
            result = self._update(state, run)
        except Stopped:
            raise
        except ModelwrightError as error:
            self.progress.note(f"schedule: update {state.update} failed: {error}")
            return self._closed(state, {"ending": "failed", "reason": str(error)})
        self.progress.note(f"schedule: update {state.update}: {result.ending}")
        state = self._closed(state, {"ending": result.ending})
        drift = state.drift.updated()
        if result.ending in ("released", "promoted"):
            state = replace(state, model=str(run.path.resolve()))
            drift = drift.released(result.version, run)
        return replace(state, update=state.update + 1, drift=drift)

    def _closed(self, state: ScheduleState, outcome: dict[str, Any]) -> ScheduleState:
        entry = {"check": state.checks, "update": state.update, "time": self.clock(), **outcome}
        return replace(state, is_open=False, history=[*state.history, entry])

    def _watched(self, state: ScheduleState, run: RunDir) -> tuple[ScheduleState, str]:
        """Compares requests and returns the state and the outcome, which is always `drift` without a reference. The
        state is written at once, so that an alarm is not lost and no window is compared twice.
        """
        if self.request.drift is None:
            return state, "drift"
        watch = ScheduledDrift(trigger=self.request.drift, progress=self.progress)
        drift, outcome = watch.check(state.drift, run)
        state = replace(state, drift=drift)
        state.write(self.folder)
        return state, outcome

    def _update(self, state: ScheduleState, run: RunDir) -> LoopResult:
        new = (str((run.path / TEXTS / TEXTS_FILE).resolve()),)
        update = replace(self.request.update, model=Path(state.model), new=new)
        request = replace(self.request, update=update, run=run, drift=None)
        result = run_loop(request, words=self.words, progress=self.progress)
        self.progress.note(result.text)
        return result

    def _keep_new_texts(self, folder: Path, number: int) -> bool:
        """Copies the texts that no earlier update had; returns False and keeps none if they are too few."""
        seen = set(self._seen(number))
        config = cast(SourceConfig, self.request.update.data.data)
        config = replace(config, sources=self.request.update.new, validation_fraction=0.0)
        lines: dict[str, str] = {}
        for document in read_documents(config, report=SourceReport(), leave_open=True):
            key = hashlib.sha256(document.identity.encode()).hexdigest()
            if key not in seen:
                lines[key] = document.to_json()
        if len(lines) < self.config.min_new:
            self.progress.note(f"schedule: {len(lines):,} new texts, {self.config.min_new:,} are needed")
            return False
        make_folder(folder.parent)
        with write_artifact(folder, kind=TEXTS, digest="") as draft:
            write_atomic(draft.path / TEXTS_FILE, "".join(f"{line}\n" for line in lines.values()))
            write_atomic(draft.path / SEEN_FILE, "".join(f"{key}\n" for key in lines))
            draft.facts["documents"] = len(lines)
        return True

    def _seen(self, number: int) -> Iterator[str]:
        """Yields the hashes of earlier updates' texts. Raises `ArtifactError` if the texts of one are gone."""
        for earlier in range(1, number):
            texts = self.folder / f"{earlier:04d}" / TEXTS
            read_manifest(texts, kind=TEXTS)
            yield from (texts / SEEN_FILE).read_text(encoding="utf-8").split()
