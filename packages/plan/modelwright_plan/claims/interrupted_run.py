"""Claim: the plan of a job on spot instances predicts the wall time of a real, interrupted run within 15%.

`modelwright run` trains in a process that is interrupted by a script: killed by SIGKILL at once, or told by SIGTERM 30
seconds before. The costs of a checkpoint and of a recovery are measured first, on a run without and on one with a
single interruption, as `modelwright plan spot --run` takes it; a simulation of the same checkpoints, losses and
recoveries then gets the script's periods, and its wall time is compared with the measured one. Notices that are waited
out and absences are as long in both, so the error without them stands next to it.
"""

import math
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import RunDir, read_manifest
from modelwright.core.config import ConfigError, ModelwrightError, derive_seed
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, read_records
from modelwright.pipeline.run import execute
from modelwright.recipes.load import load
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import estimate
from modelwright_plan.intervals import CheckpointCosts
from modelwright_plan.run_cost import measured_recovery_s, measured_stall_s

MOST_PERIODS = 200_000
"""A job that needs more periods of presence never ends: with one in an hour they are 23 years."""


@dataclass(frozen=True)
class Presence:
    """Instances run for `up_s` seconds, then missing for `down_s`. Of the former, the job knows for the last
    `notice_s` seconds that they end: it saves its state and stops.
    """

    up_s: float
    down_s: float
    notice_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SpotOutcome:
    """The uses of the time of a job, in seconds."""

    wall_s: float
    spot_s: float
    """Time on the instances: work, stalls, lost work and recoveries."""
    lost_s: float = 0.0
    """Work since the last checkpoint, and recoveries, that an interruption ended."""
    num_interruptions: int = 0


def simulate(work_s: float, *, interval_s: float, costs: CheckpointCosts, periods: Iterable[Presence]) -> SpotOutcome:
    """Run the job on spot instances until it is done. The first start takes no recovery.

    An interruption that is announced early enough for a checkpoint loses nothing but the time of its notice. Raises
    `ConfigError` if no period of presence is ever long enough for a recovery and a checkpoint.
    """
    left_s, wall_s, spot_s, lost_s = work_s, 0.0, 0.0, 0.0
    starts_new = True
    for number, period in enumerate(islice(periods, MOST_PERIODS)):
        recovery_s = 0.0 if starts_new else costs.recovery_s
        useful_s = period.up_s - period.notice_s - recovery_s
        needed_s = left_s + (math.ceil(left_s / interval_s - 1e-9)) * costs.stall_s
        if useful_s >= needed_s:
            busy_s = recovery_s + needed_s
            return SpotOutcome(wall_s=wall_s + busy_s, spot_s=spot_s + busy_s, lost_s=lost_s, num_interruptions=number)
        saved_s, gone_s = _saved(useful_s, left_s, interval_s, costs, period.notice_s)
        left_s -= saved_s
        lost_s += gone_s if useful_s >= 0 else period.up_s - period.notice_s
        wall_s += period.up_s + period.down_s
        spot_s += period.up_s
        starts_new = starts_new and period.up_s == 0
    raise ConfigError(f"interval: {interval_s:.0f} s of work between checkpoints never end; choose a shorter one")


def _saved(
    useful_s: float, left_s: float, interval_s: float, costs: CheckpointCosts, notice_s: float
) -> tuple[float, float]:
    """Seconds of work that a presence with `useful_s` seconds for work and checkpoints saves, and those of work and of
    an unfinished checkpoint that are lost at its end.
    """
    segment_s = interval_s + costs.stall_s
    num_whole = max(0, math.floor(useful_s / segment_s))
    saved_s, rest_s = num_whole * interval_s, useful_s - num_whole * segment_s
    if rest_s > 0 and notice_s >= costs.stall_s:
        return min(left_s, saved_s + min(rest_s, interval_s)), 0.0
    return saved_s, rest_s


MOST_OFF = 15.0
"""Percent of the measured wall time."""
PREDICTED, MEASURED, SAME, INTERRUPTIONS = "predicted s", "measured s", "same weights", "interruptions"
FIXED = "notices and absences s"
"""What the script itself adds to both times."""
DATA_STAGES, STAGE = ("clean", "tokenize", "pack"), "pretrain"
DOWN_S = 2.0
PATIENCE_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Course:
    """Sizes. interval_s: between checkpoints; notice_s: of an announced interruption; num_scripts: interrupted runs."""

    num_steps: int
    interval_s: float
    notice_s: float
    num_scripts: int
    num_interruptions: int
    fraction: float


def course_of(setting: Setting) -> Course:
    if setting.quick:
        return Course(
            num_steps=120, interval_s=3.0, notice_s=5.0, num_scripts=1, num_interruptions=2, fraction=0.06
        )  # fmt: skip
    return Course(num_steps=700, interval_s=15.0, notice_s=30.0, num_scripts=3, num_interruptions=4, fraction=0.3)


def measure(setting: Setting) -> Measurement:
    course = course_of(setting)
    prepared = prepare(setting, course)
    whole = _copy(prepared, setting.folder / "whole")
    setting.progress.note("a run without interruptions")
    whole_s, _ = run_through(whole, [])
    once = _copy(prepared, setting.folder / "once")
    setting.progress.note("a run with one interruption")
    run_through(once, [Presence(0.5 * whole_s, 0.0)])
    recovery_s = measured_recovery_s(RunDir(once))
    if recovery_s is None:
        raise ModelwrightError(f"{once}: the run recorded no recovery from its interruption")
    costs = CheckpointCosts(stall_s=measured_stall_s(RunDir(whole)), recovery_s=recovery_s)
    stalls = column(read_records(RunDir(whole).stage(STAGE).metrics), "checkpoint_stall_s")
    work_s = whole_s - len(stalls) * costs.stall_s
    samples: dict[str, list[float]] = {PREDICTED: [], MEASURED: [], FIXED: [], SAME: [], INTERRUPTIONS: []}
    for number in range(course.num_scripts):
        periods = script(number, course, whole_s, costs.recovery_s)
        endless = [*periods, Presence(float("inf"), 0.0)]
        planned = simulate(work_s, interval_s=course.interval_s, costs=costs, periods=endless)
        folder = _copy(prepared, setting.folder / f"script-{number}")
        measured_s, num_interruptions = run_through(folder, periods)
        samples[FIXED].append(fixed_s(periods[: min(num_interruptions, planned.num_interruptions)]))
        samples[PREDICTED].append(planned.wall_s)
        samples[MEASURED].append(measured_s)
        samples[SAME].append(float(_weights(folder) == _weights(whole)))
        samples[INTERRUPTIONS].append(float(planned.num_interruptions))
        setting.progress.note(f"script {number + 1}: predicted {planned.wall_s:.1f} s, measured {measured_s:.1f} s")
    return Measurement(samples=samples, conditions=_conditions(course, whole_s, costs, len(stalls)))


def prepare(setting: Setting, course: Course) -> Path:
    """The folder of a run whose rows are packed; its training comes later."""
    settings: dict[str, Any] = {
        "name": "interrupted",
        "stages": [*DATA_STAGES, STAGE],
        "data": {"stdlib_fraction": course.fraction},
        "training": {"checkpoint_every_minutes": course.interval_s / 60},
        STAGE: {"num_steps": course.num_steps, "eval_every_steps": 0},
    }
    folder = setting.folder / "prepared"
    request = load("continual-demo", settings, str(folder))
    words = ["run", "continual-demo"]
    execute(request.config, request.run, only=DATA_STAGES, origin="", words=words, progress=SilentProgress())
    return folder


def script(number: int, course: Course, whole_s: float, recovery_s: float) -> list[Presence]:
    """Periods of presence of which every other ends with a notice. Each is long enough for a recovery and some work."""
    dice = random.Random(derive_seed(number, "interruptions"))
    periods: list[Presence] = []
    for place in range(course.num_interruptions):
        notice_s = course.notice_s if place % 2 else 0.0
        useful_s = whole_s * dice.uniform(0.1, 0.8) / course.num_interruptions
        periods.append(Presence(recovery_s + useful_s + notice_s, DOWN_S, notice_s))
    return periods


def fixed_s(periods: Sequence[Presence]) -> float:
    """Seconds of notices and absences."""
    return sum(period.notice_s + period.down_s for period in periods)


def run_through(folder: Path, periods: Sequence[Presence]) -> tuple[float, int]:
    """Seconds from the first start to the end of a run that is interrupted as the periods say, and the interruptions
    until then.
    """
    started = time.monotonic()
    for number, period in enumerate(periods):
        with _started(folder) as process:
            begun = time.monotonic()
            if _ends(process, begun + period.up_s - period.notice_s):
                return time.monotonic() - started, number
            if period.notice_s:
                process.send_signal(signal.SIGTERM)
                _ends(process, begun + period.up_s)
                time.sleep(max(0.0, begun + period.up_s - time.monotonic()))  # the instance is there until then
        time.sleep(period.down_s)
    with _started(folder) as process:
        if not _ends(process, time.monotonic() + PATIENCE_S):
            raise ModelwrightError(f"{folder}: the run has not ended after {PATIENCE_S:.0f} s")
    return time.monotonic() - started, len(periods)


@contextmanager
def _started(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs the rest of a folder; killed at the end of the block."""
    command = [sys.executable, "-m", "modelwright.cli.main", "run", str(folder)]
    with open(folder.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ends(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait until a moment for the process to end without a signal. Raises `ModelwrightError` if it ended with an error
    that is not the answer to SIGTERM.
    """
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    if code not in (0, 128 + signal.SIGTERM):
        raise ModelwrightError(f"the run ended with exit code {code}")
    return code == 0


def _copy(prepared: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(prepared, folder, symlinks=True))


def _weights(folder: Path) -> str:
    """The digest of the trained model."""
    return read_manifest(RunDir(folder).stage(STAGE).artifact).content_digest


def _conditions(course: Course, whole_s: float, costs: CheckpointCosts, num_stalls: int) -> Conditions:
    return {
        "steps": course.num_steps,
        "without interruptions": f"{whole_s:.1f} s, {num_stalls} checkpoints",
        "interval between checkpoints": f"{course.interval_s:g} s",
        "stall of a checkpoint, measured": f"{1000 * costs.stall_s:.1f} ms",
        "recovery, measured": f"{costs.recovery_s:.1f} s",
        "script": f"{course.num_interruptions} interruptions: SIGKILL and SIGTERM with {course.notice_s:g} s of notice "
        f"in turn, {DOWN_S:g} s without an instance after each",
        "recipe": "continual-demo, its first training",
    }


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()

    def errors_without(left_out: Sequence[float]) -> list[float]:
        """Percent of the measured times, without some seconds of each run in both of its times."""
        runs = zip(samples[PREDICTED], samples[MEASURED], left_out, strict=True)
        return [100 * ((predicted - fixed) / (measured - fixed) - 1) for predicted, measured, fixed in runs]

    def shown(errors: Sequence[float]) -> str:
        return ", ".join(f"{error:+.1f}%" for error in errors)

    with judgment.part():
        errors = errors_without([0.0] * len(samples[MEASURED]))
        worst = max(map(abs, errors))
        judgment.ask("largest error of the predicted wall time", worst, "%")
        judgment.ask("error of the predicted wall time", estimate([abs(one) for one in errors]), "%", "<=", MOST_OFF)
        judgment.ask("predicted above measured", estimate(errors), "%")
        judgment.require(worst <= MOST_OFF, f"a predicted wall time is {worst:.1f}% off, not at most {MOST_OFF:g}%")
        judgment.said.append(f"{shown(errors)} beside the measured wall time of interrupted runs")
    with judgment.beside():
        own = errors_without(samples[FIXED])
        judgment.ask("largest error without notices and absences", max(map(abs, own)), "%")
        judgment.said.append(f"{shown(own)} without the notices and absences that both times contain")
    with judgment.part():
        judgment.require(all(samples[SAME]), "an interrupted run ended with other weights")
        judgment.said.append(f"{sum(samples[INTERRUPTIONS]):.0f} interruptions, same weights")
    judgment.show(samples, [PREDICTED, MEASURED], "s")
    return judgment.verdict()


CLAIM = declared(
    __name__,
    statement="The plan of a job on spot instances predicts the wall time of an interrupted run within 15%.",
    source="Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 2006",
    published="a model of expected time; no comparison with a training run",
    compared="the planner's simulation, with stall and recovery measured beforehand, against real runs that a script "
    "interrupts by SIGKILL and by SIGTERM with a notice",
    target=f"every predicted wall time within {MOST_OFF:g}% of the measured one, and the bound of their mean "
    "error, with the weights of an uninterrupted run",
    headline=("largest error of the predicted wall time", "predicted above measured"),
)
