"""The verdict on the cost of a kill, how its parts add up, and a quick measurement of our side alone."""

import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from modelwright.core.config import ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright_claims import cost_of_a_kill as claim
from modelwright_claims import killed_runs
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.cost_of_a_kill import BY_DEFAULT, HALF, IN_SAVE, KILLED, LOST, OURS, OVER, SAME, TRAINER, WHOLE
from modelwright_claims.judging import judge
from modelwright_claims.kill_worker import Task
from modelwright_claims.killed_runs import (
    FAILED,
    OLDER,
    OTHER,
    OUTCOMES,
    REDOING,
    REST,
    STALLS,
    STARTING,
    TWICE,
    WRITTEN,
    Run,
)

TASK = Task(folder="", num_steps=8, batch_rows=2, seq_len=64, threads=1, save_every=2)


def judged(
    ours: Sequence[float] = (4.0, 4.2),
    trainer: Sequence[float] = (8.0, 8.1),
    *,
    bits: float = 1.0,
    outcome: str = OLDER,
    half: float = 1.0,
) -> Verdict:
    """Seconds that two kills cost each tool; no Trainer for no seconds."""
    lost = {OURS: ours, OVER: (9.0, 9.9)} | ({TRAINER: trainer, BY_DEFAULT: (9.0, 9.5)} if trainer else {})
    samples: dict[str, list[float]] = {}
    for side, seconds in lost.items():
        samples[f"{WHOLE}, {claim.TOOLS[side]}"] = [20.0, 21.0]
        samples[f"{KILLED}, {side}"] = [20.0 + seconds[0], 21.0 + seconds[1]]
        samples[f"{SAME}, {side}"] = [1.0, bits if side == OURS else 1.0]
    for tool, found in {OURS: outcome, TRAINER: FAILED}.items() if trainer else [(OURS, outcome)]:
        samples[f"{HALF}, {tool}"] = [half, 0.0]
        for one in OUTCOMES:
            samples[f"{IN_SAVE}, {one}, {tool}"] = [float(one == found), float(one == OLDER)]
    return judge(claim.CLAIM, Measurement(samples=samples))


def test_met_where_every_kill_costs_less_and_ends_with_the_same_bits() -> None:
    met = judged()
    assert met.kind == "met"
    assert met.figures[f"{LOST}, {OURS}"].value == pytest.approx(4.1)
    assert met.figures[f"{LOST}, {OURS} over {TRAINER}"].value == pytest.approx(-3.95)
    assert met.figures[f"{claim.SAME_IN_SAVE}, {TRAINER}"].value == 50
    assert set(claim.CLAIM.headline) <= met.figures.keys()


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (judged((4.0, 8.5), (8.0, 8.1)), f"{LOST}, {OURS} over {TRAINER}"),  # less in the mean, not by the bound
        (judged(bits=0.0), f"{SAME}, {OURS} 50% (exact)"),
        (judged(outcome=OTHER), f"{claim.SAME_IN_SAVE}, {OURS} 50% (exact)"),
        (judged(outcome=FAILED), f"{claim.SAME_IN_SAVE}, {OURS} 50% (exact)"),
        (judged(half=0.0), "no kill left a half-written checkpoint"),
    ],
)
def test_short_of_each_part(verdict: Verdict, reason: str) -> None:
    assert verdict.kind == "short"
    assert reason in verdict.reason


def test_without_trainer_it_is_compared_with_starting_over_and_not_judged() -> None:
    alone = judged(trainer=())
    assert alone.kind == "not judged"
    assert f"samples '{KILLED}, {TRAINER}'" in alone.reason
    assert alone.figures[f"{LOST}, {OURS} over {OVER}"].value == pytest.approx(-5.35)


def test_kills_are_drawn_once_after_the_first_checkpoint_and_not_at_one() -> None:
    steps = claim.draw_kills(claim.FULL)
    assert steps == claim.draw_kills(claim.FULL)
    assert steps == sorted(set(steps))
    assert len(steps) == claim.FULL.num_kills
    for step in steps:
        assert claim.FULL.save_every < step < claim.FULL.size.num_steps
        assert step % claim.FULL.save_every


def made_up(began: float, starts_s: float, steps: range, *, saves_s: float, ends_s: float, code: int = 0) -> Run:
    """A process with steps of one second and a stall after every second step."""
    ends = {step: began + starts_s + step - steps.start + 1 + saves_s * ((step - 1) // 2) for step in steps}
    ends = {step: at - saves_s * ((steps.start - 1) // 2) for step, at in ends.items()}
    digest = "" if code else "weights"
    ended = ends[steps.stop - 1] + ends_s
    return Run(began=began, ended=ended, steps=ends, num_bytes=10**6, code=code, error="no room", digest=digest)


def killed_after(step: int, monkeypatch: pytest.MonkeyPatch, folder: Path, *starts: Run) -> killed_runs.Kill:
    left = list(starts)
    monkeypatch.setattr(killed_runs, "run", lambda *args, **options: left.pop(0))
    whole = made_up(0.0, 3.0, range(1, 9), saves_s=0.0, ends_s=0.25)
    return killed_runs.kill_after(step, OURS, dataclasses.replace(TASK, folder=str(folder)), whole)


def test_the_parts_of_the_lost_time_add_up_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = made_up(0.0, 3.0, range(1, 6), saves_s=0.5, ends_s=0.0, code=-signal.SIGKILL)
    again = made_up(100.0, 4.0, range(5, 9), saves_s=0.5, ends_s=0.75)
    kill = killed_after(5, monkeypatch, tmp_path, first, again)
    assert kill.is_same
    assert kill.seconds == pytest.approx(first.seconds + again.seconds)
    expected = {STARTING: 4.0, REDOING: 1.0, STALLS: 1.0 + 0.5 + 0.5, REST: 0.0, TWICE: 1, killed_runs.WRITTEN_MB: 2}
    assert kill.parts == pytest.approx(expected)
    assert kill.seconds - 11.25 == pytest.approx(sum(kill.parts[part] for part in (STARTING, REDOING, STALLS, REST)))


def test_a_run_that_ends_before_its_kill_or_does_not_resume_ends_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = made_up(0.0, 3.0, range(1, 6), saves_s=0.5, ends_s=0.0, code=-signal.SIGKILL)
    whole = made_up(0.0, 3.0, range(1, 9), saves_s=0.5, ends_s=0.0)
    for starts, reason in (
        ((whole, whole), "ended before it was killed"),
        ((first, dataclasses.replace(whole, code=1)), "a training failed: no room"),
    ):
        with pytest.raises(ModelwrightError, match=reason):
            killed_after(5, monkeypatch, tmp_path, *starts)


@pytest.mark.parametrize(
    ("state", "again", "digest", "outcome", "is_half"),
    [
        (None, range(3, 9), "weights", OLDER, True),
        ("", range(3, 9), "weights", OLDER, True),
        ('{"global_step": 4}\n', range(5, 9), "weights", WRITTEN, False),
        ('{"global_s', range(5, 9), "others", OTHER, True),
        (None, range(0), "", FAILED, True),
    ],
)
def test_how_a_training_ends_that_was_killed_in_a_save(
    state: str | None,
    again: range,
    digest: str,
    outcome: str,
    is_half: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """state: what there is of Trainer's last file when the process is killed; again: steps of the second process."""
    first = made_up(0.0, 3.0, range(1, 5), saves_s=0.0, ends_s=0.0, code=-signal.SIGKILL)
    whole = made_up(0.0, 3.0, range(1, 9), saves_s=0.0, ends_s=0.0)

    def run(tool: str, task: Task, out: Path, *, share: float | None = None) -> Run:
        if share is None:
            ends = {step: float(step) for step in again}
            return dataclasses.replace(whole, steps=ends, digest=digest, code=int(not again), error=f"no {out}/model")
        (out / "checkpoint-4").mkdir(parents=True)
        if state is not None:
            (out / "checkpoint-4" / "trainer_state.json").write_text(state)
        return first

    monkeypatch.setattr(killed_runs, "run", run)
    kill = killed_runs.kill_in_save(0.5, TRAINER, dataclasses.replace(TASK, folder=str(tmp_path)), whole)
    assert kill == killed_runs.KillInSave(outcome=outcome, is_half=is_half, error="no model" if not again else "")


@pytest.mark.slow
def test_a_quick_measurement_of_our_side_alone(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "find_spec", lambda name: None)
    monkeypatch.setattr(claim, "QUICK", dataclasses.replace(claim.QUICK, sides=(OURS, TRAINER)))
    measurement = claim.measure(Setting(quick=True, folder=text_folder, progress=SilentProgress()))
    samples = measurement.samples
    assert samples[f"{SAME}, {OURS}"] == [1.0]
    assert samples[f"{IN_SAVE}, {OLDER}, {OURS}"] == samples[f"{HALF}, {OURS}"] == [1.0]
    assert 0 < samples[f"{TWICE}, {OURS}"][0] <= 2 * claim.QUICK.save_every
    assert samples[f"{STARTING}, {OURS}"][0] > 0
    assert TRAINER in str(measurement.conditions["rivals that are not installed"])
    assert f"{KILLED}, {TRAINER}" not in samples
    assert judge(claim.CLAIM, measurement).kind == "not judged"
