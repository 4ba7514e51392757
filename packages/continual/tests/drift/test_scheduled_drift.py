"""Drift on a schedule: each window counts once, an alarm is not lost, and a new version gets a reference of its own."""

import hashlib
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from continual_requests import write_requests
from continual_schedule import Clock, Scheduled, scheduler_of, write_texts
from continual_update import new_records, write_records
from continual_world import KILLER, World, words_of
from drift_traffic import NONE, Shift, Traffic
from modelwright.cli.main import main
from modelwright_continual import schedule_drift
from modelwright_continual.drift.config import DriftConfig
from modelwright_continual.drift.reference import freeze_reference, load_reference
from modelwright_continual.drift_trigger import DRIFT_FILE, DriftTrigger
from modelwright_continual.loop import LoopResult
from modelwright_continual.schedule import STATE, ScheduleState, UpdateScheduler
from rank_processes import start_process

pytestmark = pytest.mark.slow

WINDOW, NUM_WINDOWS = 200, 5
CONFIG = DriftConfig(window_requests=WINDOW, run_length=50)
DRIFTED = Shift(other_language=0.6)
PROMOTED = LoopResult(ending="promoted", text="", version="2")
Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def first(traffic: Traffic, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference of version 1."""
    folder = tmp_path_factory.mktemp("first") / "reference"
    freeze_reference(traffic.requests(NUM_WINDOWS * WINDOW, 60), None, folder, CONFIG)
    return folder


@pytest.fixture
def scheduled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduled:
    return scheduler_of(tmp_path, monkeypatch)


class Log:
    """A log of requests that grows: each part comes after all earlier ones."""

    def __init__(self, folder: Path, traffic: Traffic) -> None:
        self.path, self._traffic = folder / "requests.jsonl", traffic
        self._records: Records = []
        self._num_parts = 0

    def add(self, shift: Shift = NONE, *, windows: int = 1, version: str | None = "1") -> None:
        self._num_parts += 1
        part = self._traffic.requests(windows * WINDOW, 60 + self._num_parts, shift=shift, start=1e7 * self._num_parts)
        self._records += [record | {"version": version} for record in part]
        write_requests(self.path, self._records)


@pytest.fixture
def log(tmp_path: Path, traffic: Traffic) -> Log:
    return Log(tmp_path, traffic)


def between_checks(scheduler: UpdateScheduler, clock: Clock, *steps: Callable[[], None]) -> UpdateScheduler:
    """A scheduler that takes a step while it waits for each check after the first, and finds a new text each time."""
    left = list(steps)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if left:
            left.pop(0)()
        write_texts(scheduler.folder.parent, *(f"text {number}" for number in range(10 - len(left))))

    return replace(scheduler, sleep=sleep)


def endings(state: ScheduleState) -> list[str]:
    return [one["ending"] for one in state.history]


def num_reports(folder: Path, update: int) -> int:
    return len(json.loads((folder / f"plan/{update:04d}" / DRIFT_FILE).read_text()))


def test_a_window_counts_once(scheduled: Scheduled, log: Log, first: Path, tmp_path: Path) -> None:
    """What has led to an update leads to no second one, and later windows alone are looked at."""
    write_texts(tmp_path, "a text")
    log.add()
    log.add(DRIFTED)
    trigger = DriftTrigger(reference=first, requests=(str(log.path),))
    scheduler, loops, clock = scheduled("refused", "refused", checks=4, drift=trigger)
    steps = (log.add, lambda: None, lambda: log.add(DRIFTED, windows=2))
    state = between_checks(scheduler, clock, *steps).run()
    assert endings(state) == ["refused", "no_drift", "no_window", "refused"]
    assert [one.run.path.name for one in loops.asked] == ["0001", "0002"]
    assert [num_reports(tmp_path, update) for update in (1, 2)] == [2, 2]
    assert all(one.drift is None for one in loops.asked)


def test_an_alarm_waits_for_texts(scheduled: Scheduled, log: Log, first: Path, tmp_path: Path) -> None:
    write_texts(tmp_path, "a text")
    log.add(DRIFTED)
    trigger = DriftTrigger(reference=first, requests=(str(log.path),))
    scheduler, _, clock = scheduled("refused", checks=2, min_new=2, drift=trigger)
    state = between_checks(scheduler, clock, log.add).run()
    assert endings(state) == ["nothing_new", "refused"]
    assert state.drift.alarmed == ()
    assert num_reports(tmp_path, 1) == 1


def test_an_alarm_outlives_a_scheduler_that_is_killed_before_its_update(
    scheduled: Scheduled, log: Log, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its windows are not compared again."""

    class Killed(BaseException):
        """Nothing after it is carried out, as after `kill -9`."""

    def kill(*arguments: object) -> bool:
        raise Killed

    write_texts(tmp_path, "a text")
    log.add(DRIFTED)
    trigger = DriftTrigger(reference=first, requests=(str(log.path),))
    scheduler, _, clock = scheduled(checks=1, drift=trigger)
    with monkeypatch.context() as patched:
        patched.setattr(UpdateScheduler, "_keep_new_texts", kill)
        with pytest.raises(Killed):
            scheduler.run()
    state = ScheduleState.read(tmp_path / "plan")
    assert state is not None
    assert state.is_open
    assert "prompt_embedding" in state.drift.alarmed
    scheduler, loops, _ = scheduled("released", clock=clock, checks=2, drift=trigger)
    with monkeypatch.context() as patched:
        patched.setattr(schedule_drift, "check_records", kill)
        state = replace(scheduler, config=replace(scheduler.config, checks=1)).run()
    assert endings(state) == ["released"]
    assert len(loops.asked) == 1
    assert endings(scheduler.run()) == ["released", "no_window"]


def test_a_promoted_version_gets_a_reference_of_its_own(
    scheduled: Scheduled, log: Log, first: Path, tmp_path: Path
) -> None:
    """As many of its requests as the first reference has; what was drift before is usual then, and the other way."""
    write_texts(tmp_path, "a text")
    log.add(DRIFTED)
    trigger = DriftTrigger(reference=first, requests=(str(log.path),))
    scheduler, _, clock = scheduled(PROMOTED, "refused", checks=5, drift=trigger)
    steps = (
        lambda: log.add(DRIFTED, windows=NUM_WINDOWS - 1, version="2"),
        lambda: log.add(DRIFTED, version="2"),
        lambda: log.add(DRIFTED, version="2"),
        lambda: log.add(version="2"),
    )
    state = between_checks(scheduler, clock, *steps).run()
    assert endings(state) == ["promoted", "no_reference", "no_window", "no_drift", "refused"]
    own = tmp_path / "plan/0001/drift-reference"
    assert state.drift.reference == str(own.resolve())
    frozen = load_reference(own)
    assert (frozen.versions, frozen.num_windows, frozen.config) == (["2"], NUM_WINDOWS, CONFIG)


def test_a_release_that_answers_nobody_changes_no_reference(
    scheduled: Scheduled, log: Log, first: Path, tmp_path: Path
) -> None:
    write_texts(tmp_path, "a text")
    log.add(DRIFTED)
    trigger = DriftTrigger(reference=first, requests=(str(log.path),))
    released = LoopResult(ending="released", text="", version="2")
    scheduler, _, clock = scheduled(released, "refused", checks=3, drift=trigger)
    state = between_checks(scheduler, clock, log.add, lambda: log.add(DRIFTED)).run()
    assert endings(state) == ["released", "no_drift", "refused"]


def test_requests_without_a_version_ask_for_a_reference(
    scheduled: Scheduled, log: Log, first: Path, traffic: Traffic, tmp_path: Path
) -> None:
    """Once a new model may have answered them. The reference that a person has frozen takes the place of the first."""
    write_texts(tmp_path, "a text")
    log.add(DRIFTED)
    trigger = DriftTrigger(reference=first, requests=(str(log.path),))
    scheduler, _, clock = scheduled(PROMOTED, checks=2, drift=trigger)
    state = between_checks(scheduler, clock, lambda: log.add(DRIFTED, version=None)).run()
    assert endings(state) == ["promoted", "failed"]
    assert "name it with --drift-reference" in state.history[1]["reason"].replace("\n", " ")
    second = tmp_path / "second"
    freeze_reference(traffic.requests(NUM_WINDOWS * WINDOW, 90, shift=DRIFTED), None, second, CONFIG)
    scheduler, _, clock = scheduled(checks=3, clock=clock, drift=replace(trigger, reference=second))
    assert endings(between_checks(scheduler, clock).run()) == ["promoted", "failed", "no_drift"]


def hashes(folder: Path) -> dict[str, str]:
    names = ("0001/release/model.safetensors", "0001/sft/artifact/model.safetensors", "0001/new-texts/new.jsonl")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@pytest.mark.slow
def test_killed_amid_an_update_it_ends_with_the_same_weights(
    world: World, log: Log, first: Path, tmp_path: Path
) -> None:
    """The command itself, on real updates that drift has led to: killed at four places and started again, beside one
    that nobody disturbs.
    """
    new = write_records(tmp_path / "new.jsonl", new_records(range(7000, 7150)))
    log.add(DRIFTED)

    def words(name: str) -> list[str]:
        plan = ("--schedule", "0.0001", "--checks", "2", "--margin", "0.5")
        drift = ("--drift-reference", first, "--requests", log.path)
        return words_of(world, tmp_path / name, *plan, *drift, new=new)

    assert main(words("quiet")) == 0
    places = (
        (r"/0001/drift\.json$", "before"), (r"/0001/drift\.json$", "after"), (r"/0001/new-texts$", "after"),
        (r"sft/checkpoints/", "after"),
    )  # fmt: skip
    for pattern, when in places:
        environment = {"KILL_AT": pattern, "KILL_WHEN": when}
        code, _, errors = start_process(KILLER, *words("killed"), environment=environment).end()
        assert code == -signal.SIGKILL, (pattern, errors)
    assert main(words("killed")) == 0
    assert hashes(tmp_path / "killed") == hashes(tmp_path / "quiet")
    for name in ("quiet", "killed"):
        state = json.loads((tmp_path / name / STATE).read_text())
        assert [one["ending"] for one in state["history"]] == ["released", "no_window"]
