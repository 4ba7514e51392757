"""Updates on a schedule: at each due time the loop runs on the texts that have come since, if requests have drifted or
whenever it is due.

State is one file. It says before anything else happens which update is under way, so a process that was killed goes on
with it; a lock keeps a second scheduler out of the folder. Every text is given to one update: a copy of those that no
earlier one had is kept in the update's folder, because sources may grow meanwhile. Every window of requests is compared
once (`schedule_drift.py`).
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from modelwright.core.artifacts import is_finished, make_folder, read_manifest, write_artifact, write_atomic
from modelwright.core.errors import ArtifactError, ConfigError, ModelwrightError, Stopped
from modelwright.core.progress import Progress
from modelwright.core.rundir import RunDir, lock_folder
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright_continual.loop import LoopRequest, LoopResult, run_loop
from modelwright_continual.schedule_drift import DriftState, ScheduledDrift

STATE = "schedule.json"
TEXTS, TEXTS_FILE, SEEN_FILE = "new-texts", "new.jsonl", "seen.txt"
HOUR_S = 3600.0
_NAP_S = 30.0
"""The longest sleep; a clock that is set is noticed after it."""


@dataclass(frozen=True, kw_only=True)
class UpdateSchedule:
    """every_s: seconds between two checks; min_new: fewer new texts than that wait for more; checks: after which the
    schedule ends, 0 for never.
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
    """due: Unix time of the next check; checks: that have begun; update: the number of the newest update, of which
    `is_open` says that it has not ended; model: what the next one begins with; drift: which requests were compared;
    history: how each check ended.
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
        """None if nothing was scheduled in the folder. Raises `ArtifactError` if the file is damaged."""
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
    """request: of an update; its run is the folder of the schedule, and `update.model` what the first one begins with.
    clock, sleep: for tests.

    Raises `ConfigError` for a request that could be carried out for the first update only.
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
        """Check again and again; returns after the last check. Raises `Stopped`, and `ModelwrightError` if another
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
                    state = replace(state, is_open=True, checks=state.checks + 1, due=self._next_due(state.due))
                    state.write(self.folder)
                state = self._checked(state)
                state.write(self.folder)
            return state

    def _waited(self, state: ScheduleState) -> ScheduleState:
        """The state once its check is due. No check is further ahead than the interval: the clock was set back then, or
        the interval is shorter than it was.
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
        """The next one of the schedule's times that lies ahead: what was missed meanwhile is made up for once."""
        missed = max(0.0, self.clock() - due)
        return due + (math.floor(missed / self.config.every_s) + 1) * self.config.every_s

    def _checked(self, state: ScheduleState) -> ScheduleState:
        """The state after the open check. What a person has to mend is noted, and the same update tried again when the
        next check is due.
        """
        run = RunDir(self.folder / f"{state.update:04d}")
        try:
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
        """The state after requests were compared, and whether there is `drift`; without a reference there always is.
        Whatever comes next, an alarm is not lost, and no window is compared again.
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
        """Copy the texts that no earlier update had; false, and nothing is kept, if there are too few."""
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
        """Hashes of the texts that earlier updates had. Raises `ArtifactError` if the texts of one are gone."""
        for earlier in range(1, number):
            texts = self.folder / f"{earlier:04d}" / TEXTS
            read_manifest(texts, kind=TEXTS)
            yield from (texts / SEEN_FILE).read_text(encoding="utf-8").split()
