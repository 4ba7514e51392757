"""The schedule: what is due when, each text in one update, one scheduler at a time. drift/test_scheduled_drift.py has
what requests decide, and `kill -9`.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from continual_schedule import DAY_S, Scheduled, scheduler_of, write_texts
from modelwright.core.artifacts import ArtifactError, lock_folder
from modelwright.core.config import DataError, ModelwrightError
from modelwright_continual import schedule
from modelwright_continual.loop import LoopRequest, LoopResult
from modelwright_continual.schedule import STATE, ScheduleState
from refusals import config_error


@pytest.fixture
def scheduled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduled:
    return scheduler_of(tmp_path, monkeypatch)


def test_each_text_goes_to_one_update_and_the_next_model_follows_the_last(scheduled, tmp_path: Path) -> None:
    write_texts(tmp_path, "one text", "another text")
    scheduler, loops, clock = scheduled("released", "refused", "promoted")
    began = clock.now

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        write_texts(
            tmp_path, "one text", "another text", *(f"text {number}" for number in range(round(clock.now) // 40000))
        )

    state = replace(scheduler, sleep=sleep).run()
    assert [one["ending"] for one in state.history] == ["released", "refused", "promoted"]
    assert loops.texts(0) == ["one text", "another text"]
    texts = [text for number in range(3) for text in loops.texts(number)]
    assert len(texts) == len(set(texts)) > 4
    first = str((tmp_path / "plan/0001").resolve())
    assert [str(one.update.model) for one in loops.asked] == [str((tmp_path / "model").resolve()), first, first]
    assert state.model == str((tmp_path / "plan/0003").resolve())
    assert [one["time"] for one in state.history] == [began, began + DAY_S, began + 2 * DAY_S]


def test_without_enough_new_texts_nothing_is_updated(scheduled, tmp_path: Path) -> None:
    write_texts(tmp_path, "one text", "another text")
    scheduler, loops, _ = scheduled(checks=2, min_new=3)
    state = scheduler.run()
    assert [one["ending"] for one in state.history] == ["nothing_new", "nothing_new"]
    assert (loops.asked, state.update) == ([], 1)


def test_what_failed_is_tried_again_with_the_same_texts_when_it_is_due(scheduled, tmp_path: Path) -> None:
    write_texts(tmp_path, "one text")
    failure = DataError("the disk is full")
    scheduler, loops, clock = scheduled(failure, "released", checks=2)
    began = clock.now

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        write_texts(tmp_path, "one text", "a later text")

    state = replace(scheduler, sleep=sleep).run()
    assert [(one["ending"], one.get("reason", "")) for one in state.history] == [
        ("failed", "the disk is full"), ("released", ""),
    ]  # fmt: skip
    assert loops.texts(0) == loops.texts(1) == ["one text"]
    assert loops.asked[0].run == loops.asked[1].run
    assert clock.now == began + DAY_S


def test_a_killed_update_goes_on_at_once_and_what_was_missed_is_made_up_for_once(scheduled, tmp_path: Path) -> None:
    write_texts(tmp_path, "one text")

    class Killed(BaseException):
        """Nothing after it is carried out, as after `kill -9`."""

    scheduler, loops, clock = scheduled(checks=3)
    began = clock.now
    loops.endings = [Killed()]
    with pytest.raises(Killed):
        replace(scheduler).run()
    state = ScheduleState.read(tmp_path / "plan")
    assert state is not None
    assert (state.is_open, state.checks, state.due) == (True, 1, began + DAY_S)
    clock.now += 3.5 * DAY_S
    scheduler, loops, clock = scheduled("released", clock=clock, checks=3)
    state = scheduler.run()
    assert [one["ending"] for one in state.history] == ["released", "nothing_new", "nothing_new"]
    assert [(one["time"] - began) / DAY_S for one in state.history] == [3.5, 3.5, 4.0]


def test_a_clock_that_is_set_back_delays_no_check_beyond_the_interval(scheduled, tmp_path: Path) -> None:
    """Both while it waits and between two processes."""
    write_texts(tmp_path, "one text")
    scheduler, _, clock = scheduled("released")
    scheduler.run()
    clock.now -= 400 * DAY_S
    restarted = clock.now
    scheduler, _, _ = scheduled(clock=clock, checks=3)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if len(clock.slept) == 1:
            clock.now -= 10 * DAY_S

    state = replace(scheduler, sleep=sleep).run()
    assert [one["ending"] for one in state.history] == ["released", "nothing_new", "nothing_new"]
    assert [(one["time"] - restarted) / DAY_S for one in state.history[1:]] == [-8.0, -7.0]


def test_what_only_a_first_update_could_do_is_refused(scheduled, tmp_path: Path) -> None:
    scheduler, _, _ = scheduled("released")
    with config_error("champion"):
        replace(scheduler, request=replace(scheduler.request, champion=tmp_path / "served"))
    with config_error("floor", match=r"--floor: .*leave it out"):
        replace(scheduler, request=replace(scheduler.request, floor=True))
    link = tmp_path / "current"
    replace(scheduler, request=replace(scheduler.request, champion=link, current=link))


def test_texts_of_an_update_that_are_gone_are_not_given_again(scheduled, tmp_path: Path) -> None:
    write_texts(tmp_path, "one text")
    scheduler, loops, _ = scheduled("released", checks=2)

    def run_loop(request: LoopRequest, **more: Any) -> LoopResult:
        shutil.rmtree(request.run.path)
        return loops(request, **more)

    with mock.patch.object(schedule, "run_loop", run_loop):
        state = scheduler.run()
    assert [one["ending"] for one in state.history] == ["released", "failed"]
    assert "0001/new-texts" in state.history[1]["reason"]


def test_a_second_scheduler_and_a_damaged_state_are_refused(scheduled, tmp_path: Path) -> None:
    scheduler, _, _ = scheduled("released")
    folder = scheduler.request.run.create().path
    with lock_folder(folder, "the first"), pytest.raises(ModelwrightError, match="one is enough"):
        scheduler.run()
    (folder / STATE).write_text("{")
    with pytest.raises(ArtifactError, match="is damaged"):
        scheduler.run()
