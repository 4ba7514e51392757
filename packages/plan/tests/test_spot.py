"""Checkpoint intervals; the simulation against Daly's model and a naive twin; deadlines; the command."""

import itertools
import json
import math
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from modelwright_plan.spot.availability import (
    BurstyInterruptions,
    PoissonInterruptions,
    Presence,
    SpotTrace,
    WithNotice,
    read_trace,
)
from modelwright_plan.spot.simulate import (
    num_checkpoints,
    simulate,
    simulate_with_deadline,
)
from scipy.special import lambertw

from modelwright.cli.main import main
from modelwright.core.errors import ConfigError, DataError
from modelwright_plan.spot.intervals import CheckpointCosts, daly_interval_s, expected_wall_s, young_interval_s
from modelwright_plan.spot.plan import SpotJob, plan_spot, spot_tornado

HOUR = 3600.0
COSTS = CheckpointCosts(stall_s=30.0, recovery_s=240.0)


def best_of_model_s(stall_s: float, mtbf_s: float) -> float:
    """The interval at which the derivative of Daly's model is zero."""
    return mtbf_s * (1 + float(lambertw(-math.exp(-stall_s / mtbf_s - 1)).real))


def test_intervals() -> None:
    assert young_interval_s(60, 21_600) == pytest.approx(1609.969, abs=1e-3)
    assert daly_interval_s(60, 21_600) == pytest.approx(1570.217, abs=1e-3)
    assert daly_interval_s(50, 20) == 20
    assert math.isinf(daly_interval_s(60, math.inf))
    # The captions of Daly's figures 3 to 5: checkpoints of 5 minutes, interruptions every 24 h, 6 h and 15 min.
    published = [round(daly_interval_s(300, hours * HOUR) / 60, 1) for hours in (24, 6, 0.25)]
    assert published == pytest.approx([117, 57, 9.1], abs=0.5)
    for stall_s, mtbf_s in itertools.product((5, 60, 600), (HOUR, 6 * HOUR, 48 * HOUR)):
        exact = best_of_model_s(stall_s, mtbf_s)
        assert daly_interval_s(stall_s, mtbf_s) == pytest.approx(exact, rel=2e-3)
        assert abs(daly_interval_s(stall_s, mtbf_s) - exact) < abs(young_interval_s(stall_s, mtbf_s) - exact)


def test_expected_time_without_interruptions_is_work_and_checkpoints() -> None:
    assert expected_wall_s(100, 30, CheckpointCosts(stall_s=2, recovery_s=9), math.inf) == pytest.approx(108)
    assert expected_wall_s(90, 30, CheckpointCosts(stall_s=2, recovery_s=9), 1e9) == pytest.approx(96, rel=1e-6)
    assert math.isinf(expected_wall_s(1e6, 1e6, CheckpointCosts(stall_s=2, recovery_s=9), 100))


@pytest.mark.parametrize("mtbf_s", [HOUR, 8 * HOUR])
@pytest.mark.parametrize(("stall_s", "recovery_s"), [(10.0, 60.0), (120.0, 900.0)])
@pytest.mark.parametrize("times", [0.4, 1.0, 3.0])
def test_simulation_equals_dalys_expectation(mtbf_s: float, stall_s: float, recovery_s: float, times: float) -> None:
    costs = CheckpointCosts(stall_s=stall_s, recovery_s=recovery_s)
    interval_s = times * daly_interval_s(stall_s, mtbf_s)
    share = expected_wall_s(interval_s, interval_s, costs, mtbf_s) / interval_s
    work_s = interval_s * round(40_000 * mtbf_s / share / interval_s)  # about 40,000 interruptions
    periods = PoissonInterruptions(mtbf_s=mtbf_s).periods(seed=1)
    outcome = simulate(work_s, interval_s=interval_s, costs=costs, periods=periods)
    assert outcome.wall_s == pytest.approx(expected_wall_s(work_s, interval_s, costs, mtbf_s), rel=0.02)
    assert outcome.num_interruptions == pytest.approx(outcome.wall_s / mtbf_s, rel=0.02)


def naive(work_s: int, interval_s: int, costs: CheckpointCosts, periods: Iterable[Presence]) -> tuple[int, int, int]:
    """The same, second by second: wall, spot and lost seconds."""
    saved = wall = spot = lost = 0
    recovery_left, has_begun = 0, False
    for period in periods:
        unsaved = stalled = recovered = 0
        recovery_left = int(costs.recovery_s) if has_begun else 0
        if saved == work_s and period.up_s - period.notice_s >= recovery_left:  # in a notice
            return wall + recovery_left, spot + recovery_left, lost
        for second in range(int(period.up_s)):
            wall, spot, has_begun = wall + 1, spot + 1, True
            if second >= period.up_s - period.notice_s:  # it saves, if there is time for that, and waits for the end
                if not recovery_left and period.notice_s >= costs.stall_s:
                    saved, unsaved, stalled = saved + unsaved, 0, 0
                continue
            if recovery_left:
                recovery_left, recovered = recovery_left - 1, recovered + 1
                continue
            if unsaved < min(interval_s, work_s - saved):
                unsaved += 1
            else:
                stalled += 1
            if stalled == costs.stall_s:
                saved, unsaved, stalled = saved + unsaved, 0, 0
            if saved == work_s:
                return wall, spot, lost
        lost += unsaved + stalled + (recovered if recovery_left else 0)
        wall += int(period.down_s)
    raise AssertionError("the periods ended")


@pytest.mark.parametrize("notices", [(0,), (0, 2, 6)])
def test_simulation_equals_a_naive_twin(notices: tuple[int, ...]) -> None:
    draw = random.Random(3)
    for _ in range(150):
        costs = CheckpointCosts(stall_s=draw.randint(1, 4), recovery_s=draw.randint(0, 9))
        interval_s, work_s = draw.randint(1, 30), draw.randint(1, 200)
        mean = draw.choice((40, 90))
        drawn = [Presence(draw.choice((0, 1, draw.randint(0, mean))), draw.randint(0, 9)) for _ in range(300)]
        drawn = [replace(one, notice_s=min(int(one.up_s), draw.choice(notices))) for one in drawn]
        periods = [*drawn, Presence(10_000, 0)]
        outcome = simulate(work_s, interval_s=interval_s, costs=costs, periods=periods)
        wall_s, spot_s, lost_s = naive(work_s, interval_s, costs, periods)
        assert (outcome.wall_s, outcome.spot_s) == (wall_s, spot_s)
        assert outcome.lost_s == lost_s


def test_a_notice_saves_the_work_since_the_last_checkpoint() -> None:
    silent = PoissonInterruptions(mtbf_s=2 * HOUR)
    job = SpotJob(work_s=30 * HOUR, costs=COSTS, availability=silent, spot_usd=1.0, on_demand_usd=3.0)
    told = replace(job, availability=WithNotice(inner=silent, notice_s=120.0))
    plain, warned = plan_spot(job, num_samples=40), plan_spot(told, num_samples=40)
    assert warned.interval_s > 2 * plain.interval_s, "with a notice checkpoints in between are hardly needed"
    assert warned.mean_wall_s < plain.mean_wall_s
    num_interruptions = statistics.fmean(outcome.num_interruptions for outcome in warned.outcomes)
    ideal_s = 30 * HOUR + num_interruptions * (120.0 + COSTS.recovery_s)
    assert warned.mean_wall_s == pytest.approx(ideal_s, rel=0.02)


def test_a_notice_is_no_longer_than_the_presence_that_it_ends() -> None:
    told = WithNotice(inner=PoissonInterruptions(mtbf_s=100.0), notice_s=120.0)
    periods = list(itertools.islice(told.periods(0), 50))
    assert {period.up_s < 120.0 for period in periods} == {False, True}
    assert all(period.notice_s == min(120.0, period.up_s) for period in periods)
    outcome = simulate(600.0, interval_s=60.0, costs=COSTS, periods=[*periods, Presence(10_000, 0)])
    assert outcome.lost_s >= 0


def spells(seed: int, *, mean_up: float, mean_down: float) -> SpotTrace:
    """A trace of spells of presence and absence, in ticks of five minutes."""
    draw, counts = random.Random(seed), list[int]()
    while len(counts) < 600:
        counts += [1] * math.ceil(draw.expovariate(1 / mean_up)) + [0] * math.ceil(draw.expovariate(1 / mean_down))
    return SpotTrace(gap_s=300.0, counts=counts)


AVAILABILITIES = {
    "frequent": PoissonInterruptions(mtbf_s=HOUR / 2),
    "absences": PoissonInterruptions(mtbf_s=5 * HOUR, down_s=HOUR / 2),
    "rare": PoissonInterruptions(mtbf_s=40 * HOUR, down_s=600.0),
    "bursts": BurstyInterruptions(calm_mtbf_s=20 * HOUR, burst_mtbf_s=HOUR, calm_s=20 * HOUR, burst_s=2 * HOUR),
    "hard bursts": BurstyInterruptions(
        calm_mtbf_s=100 * HOUR, burst_mtbf_s=HOUR / 6, calm_s=30 * HOUR, burst_s=4 * HOUR, down_s=300.0
    ),
    "trace": spells(1, mean_up=30, mean_down=4),
    "trace of long spells": spells(2, mean_up=150, mean_down=20),
    "notice": WithNotice(inner=PoissonInterruptions(mtbf_s=3 * HOUR), notice_s=120.0),
}
JOBS = [
    pytest.param(name, costs, work_h, slack, id=f"{name}, stall {costs.stall_s:g} s, {work_h:g} h, slack {slack:g}")
    for name, costs, work_h, slack in itertools.product(
        AVAILABILITIES,
        (CheckpointCosts(stall_s=5.0, recovery_s=60.0), CheckpointCosts(stall_s=120.0, recovery_s=400.0)),
        (1.5, 40.0),
        (1.15, 1.6, math.inf),
    )
    if not (name == "notice" and math.isfinite(slack))
]


def mean_objective(job: SpotJob, interval_s: float, num_courses: int) -> float:
    """Of courses that the planner has not seen; infinite for an interval with which the job cannot be done."""
    seeds = range(10_000, 10_000 + num_courses)
    try:
        return statistics.fmean(job.objective(job.outcome(interval_s, seed)) for seed in seeds)
    except ConfigError:
        return math.inf


@pytest.mark.parametrize(("name", "costs", "work_h", "slack"), JOBS)
def test_a_plan_is_within_5_percent_of_the_best_interval(
    name: str, costs: CheckpointCosts, work_h: float, slack: float
) -> None:
    """The planner's own choice against the least over intervals from seconds to the whole work, or to what takes
    hundreds of attempts.
    """
    work_s, availability = work_h * HOUR, AVAILABILITIES[name]
    job = SpotJob(
        work_s=work_s, costs=costs, availability=availability, spot_usd=1.0, on_demand_usd=3.0,
        deadline_s=slack * work_s + (costs.recovery_s + 3 * costs.stall_s if math.isfinite(slack) else 0.0),
    )  # fmt: skip
    shortest_s, longest_s = max(costs.stall_s / 4, work_s / 2000), work_s
    if isinstance(availability, PoissonInterruptions) and math.isinf(slack):
        longest_s = min(work_s, 6 * availability.mtbf_s)
    intervals = [shortest_s * (longest_s / shortest_s) ** (number / 30) for number in range(31)]
    num_courses = 60 if work_h > 10 else 400  # a short job has few interruptions in each
    best = min(mean_objective(job, interval_s, num_courses) for interval_s in intervals)
    chosen = plan_spot(job, num_samples=1).interval_s
    assert mean_objective(job, chosen, num_courses) <= 1.05 * best


def test_bursts_have_the_stated_rate_and_come_together() -> None:
    model = BurstyInterruptions(calm_mtbf_s=10 * HOUR, burst_mtbf_s=HOUR / 4, calm_s=20 * HOUR, burst_s=2 * HOUR)
    gaps = [period.up_s for period in itertools.islice(model.periods(seed=2), 40_000)]
    assert statistics.fmean(gaps) == pytest.approx(model.mtbf_s, rel=0.05)
    assert dispersion(gaps, window_s=10 * HOUR) > 3  # 1 for a Poisson process
    plain = [period.up_s for period in itertools.islice(PoissonInterruptions(mtbf_s=HOUR).periods(0), 40_000)]
    assert dispersion(plain, window_s=10 * HOUR) == pytest.approx(1, abs=0.1)


def dispersion(gaps: list[float], *, window_s: float) -> float:
    """Variance over mean of the number of interruptions in a window."""
    counts = [0] * (int(sum(gaps) / window_s) + 1)
    for time_s in itertools.accumulate(gaps):
        counts[min(len(counts) - 1, int(time_s / window_s))] += 1
    return statistics.pvariance(counts[:-1]) / statistics.fmean(counts[:-1])


def test_a_trace_goes_round_from_any_tick() -> None:
    trace = SpotTrace(gap_s=10.0, counts=[2, 2, 0, 1, 2, 2], needed=2)
    assert trace.mtbf_s == 40.0  # present for 4 ticks, of which the last two and the first two are one presence
    for seed in range(12):
        periods = list(itertools.islice(trace.periods(seed), 1, 6))
        assert set(periods) == {Presence(40.0, 20.0)}
    assert SpotTrace(gap_s=10.0, counts=[1, 1]).mtbf_s == math.inf
    always = simulate(100, interval_s=50, costs=COSTS, periods=SpotTrace(gap_s=1.0, counts=[1]).periods(0))
    assert always.wall_s == 160


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not valid JSON"),
        ('{"data": [1]}', "is no spot trace"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds must be above 0"),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, "x"]}', "data must be a list of whole numbers"),
        ('{"metadata": {"gap_seconds": 60}, "data": [0, 0]}', "never there at once"),
    ],
)
def test_a_bad_trace_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def hostile(interval_s: float) -> Iterator[Presence]:
    """Interrupts every segment in its last second."""
    while True:
        yield Presence(COSTS.recovery_s + interval_s + COSTS.stall_s - 1, 60.0)


def test_the_deadline_is_met_whatever_happens() -> None:
    draw, interval_s, work_s = random.Random(4), 900.0, 10 * HOUR
    least_s = COSTS.recovery_s + work_s + num_checkpoints(work_s, interval_s) * COSTS.stall_s
    used_spot = 0
    for seed in range(400):
        mean_s = draw.choice((300.0, 1500.0, 3 * HOUR, 40 * HOUR))
        model = PoissonInterruptions(mtbf_s=mean_s, down_s=draw.choice((0.0, 120.0, 4 * HOUR)))
        periods = hostile(interval_s) if seed % 10 == 0 else model.periods(seed)
        deadline_s = least_s * draw.choice((1.0, 1.001, 1.1, 1.5, 3.0))
        outcome = simulate_with_deadline(
            work_s, deadline_s=deadline_s, interval_s=interval_s, costs=COSTS, periods=periods
        )
        assert outcome.wall_s <= deadline_s + 1e-6
        assert outcome.spot_s + outcome.on_demand_s >= work_s
        used_spot += outcome.on_demand_s == 0
    assert used_spot > 40
    with pytest.raises(ConfigError, match=r"too short, even on demand; the least is 10\.40 h"):
        simulate_with_deadline(work_s, deadline_s=work_s, interval_s=interval_s, costs=COSTS, periods=hostile(900.0))


def test_without_interruptions_everything_is_on_spot_instances() -> None:
    calm = [Presence(math.inf, 0.0)]
    outcome = simulate_with_deadline(10 * HOUR, deadline_s=12 * HOUR, interval_s=900.0, costs=COSTS, periods=calm)
    assert outcome.on_demand_s == 0
    assert outcome.wall_s == pytest.approx(10 * HOUR + 40 * 30 + 240)


def test_a_later_deadline_costs_less() -> None:
    model = PoissonInterruptions(mtbf_s=2 * HOUR, down_s=HOUR)
    job = {"work_s": 20 * HOUR, "costs": COSTS, "availability": model, "spot_usd": 1.0, "on_demand_usd": 3.0}
    means = [plan_spot(SpotJob(**job, deadline_s=h * HOUR), num_samples=100).mean_usd for h in (22, 28, 40, 80)]
    assert means == sorted(means, reverse=True)
    assert means[0] > 1.5 * means[-1]


def test_sensitivity_of_a_job() -> None:
    model = PoissonInterruptions(mtbf_s=5 * HOUR)
    job = SpotJob(work_s=30 * HOUR, costs=COSTS, availability=model, spot_usd=2.0, on_demand_usd=6.0)
    plan = plan_spot(job, num_samples=100)
    assert plan.mean_wall_s == pytest.approx(plan.expected_wall_s, rel=0.02)
    swings = {swing.name: swing for swing in spot_tornado(plan, factor=2.0, num_samples=100)}
    price = swings["spot price, $/h"]
    assert (price.at_low, price.at_high) == pytest.approx((plan.mean_usd / 2, plan.mean_usd * 2))
    rare = swings["hours between interruptions"]
    assert rare.at_low > plan.mean_usd > rare.at_high
    assert list(swings)[-1] in ("recovery, s", "stall of a checkpoint, s")


def test_sensitivity_near_a_deadline_stays_within_what_can_be_done() -> None:
    model = PoissonInterruptions(mtbf_s=5 * HOUR)
    least_s = 30 * HOUR + COSTS.recovery_s + COSTS.stall_s
    job = SpotJob(
        work_s=30 * HOUR, costs=COSTS, availability=model, spot_usd=2.0, on_demand_usd=6.0, deadline_s=least_s + 900
    )  # fmt: skip
    plan = plan_spot(job, num_samples=20)
    swings = {swing.name: swing for swing in spot_tornado(plan, factor=4.0, num_samples=20)}
    assert swings["recovery, s"].high <= COSTS.recovery_s + 900
    assert swings["stall of a checkpoint, s"].high < 4 * COSTS.stall_s + 900
    assert swings["hours of work"].high == 30.0


def test_bursts_are_planned_by_simulation() -> None:
    model = BurstyInterruptions(calm_mtbf_s=100 * HOUR, burst_mtbf_s=HOUR / 6, calm_s=30 * HOUR, burst_s=4 * HOUR)
    job = SpotJob(work_s=100 * HOUR, costs=COSTS, availability=model, spot_usd=1.0, on_demand_usd=3.0)
    plan = plan_spot(job, num_samples=40)
    by_daly = statistics.fmean(job.outcome(plan.daly_s, seed).wall_s for seed in range(40))
    assert plan.mean_wall_s <= by_daly


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "spot", "--work-hours", "40", "--stall-s", "5", "--recovery-s", "180", "--instance", "g5.xlarge"]
    words += ["--samples", "20"]
    often = ["--interruptions-per-hour", "0.2"]
    task = tmp_path / "task.yaml"
    made = ["--skypilot", str(task), "--target", "quickstart", "--bucket", "my-runs", "--deadline-hours", "60"]
    assert main([*words, *often, *made, "--html", str(tmp_path / "spot.html")]) == 0
    assert "deadline         60 h 00 min, met in all courses" in capsys.readouterr().out
    assert yaml.safe_load(task.read_text())["resources"]["instance_type"] == "g5.xlarge"
    assert "<svg" in (tmp_path / "spot.html").read_text()
    (tmp_path / "trace.json").write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1] * 30 + [0] * 6}))
    assert main([*words, "--trace", str(tmp_path / "trace.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["wall_s"]["mean"] > 40 * HOUR * 36 / 30 * 0.95
    run = tmp_path / "run"
    (run / "pretrain").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    stalls = [{"step": n, "checkpoint_stall_s": stall} for n, stall in enumerate((0.5, 4.0, 0.7))]
    (run / "pretrain" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stalls))
    measured = ["--run", str(run), "--work-hours", "4", "--instance", "g5.xlarge", *often]
    assert main(["plan", "spot", *measured]) == 2
    assert "was never interrupted without notice and resumed; give --recovery-s" in capsys.readouterr().err
    assert main(["plan", "spot", *measured, "--recovery-s", "60", "--samples", "5"]) == 0
    assert "a checkpoint stalls it 0.7 s, a recovery takes 60 s" in capsys.readouterr().out
    assert main([*words, *often, "--deadline-hours", "39"]) == 2
    assert "too short, even on demand" in capsys.readouterr().err
    assert main([*words, *often, "--deadline-hours", "60", "--notice-s", "120"]) == 2
    assert "--notice-s: the plan for a deadline makes no use of notices" in capsys.readouterr().err
