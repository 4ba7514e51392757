"""The plan of a job on spot instances: how often to save, how long it takes, what it costs, and how sure that is."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from modelwright.core.errors import ConfigError
from modelwright.plan.cost.sensitivity import Swing, tornado
from modelwright.plan.spot.availability import Availability, PoissonInterruptions, Presence
from modelwright.plan.spot.intervals import CheckpointCosts, daly_interval_s, expected_wall_s, young_interval_s
from modelwright.plan.spot.simulate import (
    SpotOutcome,
    interval_grid,
    num_checkpoints,
    simulate,
    simulate_with_deadline,
)

CHOOSING_INTERRUPTIONS = 4000
"""In all courses together by which an interval is chosen, where that takes no more than `MOST_COURSES`: a short job has
few in each course, and of few courses chance chooses the interval."""
FEWEST_COURSES, MOST_COURSES = 40, 1000


@dataclass(frozen=True, kw_only=True)
class SpotJob:
    """A job, the instances that it runs on, and what they cost an hour, all together."""

    work_s: float
    costs: CheckpointCosts
    availability: Availability
    spot_usd: float
    on_demand_usd: float
    deadline_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.work_s < math.inf:
            raise ConfigError(f"--work-hours: must be above 0, got {self.work_s / 3600}")
        if not self.deadline_s > 0:
            raise ConfigError(f"--deadline-hours: must be above 0, got {self.deadline_s / 3600}")

    def outcome(self, interval_s: float, seed: int) -> SpotOutcome:
        """One simulated course of the job."""
        return self.course(interval_s, self.availability.periods(seed))

    def course(self, interval_s: float, periods: Iterable[Presence]) -> SpotOutcome:
        """The job while instances are there and missing as the periods say."""
        interval_s = min(interval_s, self.work_s)
        if math.isinf(self.deadline_s):
            return simulate(self.work_s, interval_s=interval_s, costs=self.costs, periods=periods)
        return simulate_with_deadline(
            self.work_s, deadline_s=self.deadline_s, interval_s=interval_s, costs=self.costs, periods=periods
        )

    def outcomes(self, interval_s: float, num_samples: int) -> list[SpotOutcome]:
        return [self.outcome(interval_s, seed) for seed in range(num_samples)]

    def cost(self, outcome: SpotOutcome) -> float:
        return outcome.cost(spot_usd=self.spot_usd, on_demand_usd=self.on_demand_usd)

    def objective(self, outcome: SpotOutcome) -> float:
        """What the plan makes small: seconds, or with a deadline, which is met in any case, dollars."""
        return outcome.wall_s if math.isinf(self.deadline_s) else self.cost(outcome)

    @property
    def on_demand_wall_s(self) -> float:
        """The job on on-demand instances, which need one checkpoint, at the end."""
        return self.work_s + self.costs.stall_s


@dataclass(frozen=True, kw_only=True)
class SpotPlan:
    """The chosen interval and what came of it in simulation."""

    job: SpotJob
    young_s: float
    daly_s: float
    interval_s: float
    """Chosen: Daly's for Poisson interruptions without a deadline, else the best of the simulated grid."""
    expected_wall_s: float
    """By Daly's model, which knows no absence, notice or deadline."""
    outcomes: Sequence[SpotOutcome]

    @property
    def mean_usd(self) -> float:
        return statistics.fmean(map(self.job.cost, self.outcomes))

    @property
    def mean_wall_s(self) -> float:
        return statistics.fmean(outcome.wall_s for outcome in self.outcomes)

    @property
    def on_demand_usd(self) -> float:
        return self.job.on_demand_wall_s * self.job.on_demand_usd / 3600


def plan_spot(job: SpotJob, *, num_samples: int) -> SpotPlan:
    """Choose the interval and simulate the job with it. num_samples: simulated courses, each with its own seed."""
    mtbf_s, stall_s = job.availability.mtbf_s, job.costs.stall_s
    daly_s = min(job.work_s, daly_interval_s(stall_s, mtbf_s))
    interval_s = daly_s
    if not isinstance(job.availability, PoissonInterruptions) or not math.isinf(job.deadline_s):
        interval_s = best_interval_s(job, interval_grid(daly_s, work_s=job.work_s), seeds=range(_num_courses(job)))
    return SpotPlan(
        job=job,
        young_s=young_interval_s(stall_s, mtbf_s),
        daly_s=daly_s,
        interval_s=interval_s,
        expected_wall_s=expected_wall_s(job.work_s, interval_s, job.costs, mtbf_s),
        outcomes=job.outcomes(interval_s, num_samples),
    )


def _num_courses(job: SpotJob) -> int:
    """Courses that are enough to choose by."""
    wanted = math.ceil(min(MOST_COURSES, CHOOSING_INTERRUPTIONS * job.availability.mtbf_s / job.work_s))
    return max(FEWEST_COURSES, wanted)


def best_interval_s(job: SpotJob, intervals: Sequence[float], *, seeds: Sequence[int]) -> float:
    """The interval with the least `SpotJob.objective` on average, over the same courses for all. One with which the job
    never ends, or misses its deadline, is passed over; raises its `ConfigError` if none is left.
    """
    totals = dict.fromkeys(intervals, 0.0)
    refusals: dict[float, ConfigError] = {}
    for seed in seeds:
        copies = itertools.tee(job.availability.periods(seed), len(totals))
        for interval_s, periods in zip(list(totals), copies, strict=True):
            try:
                totals[interval_s] += job.objective(job.course(interval_s, periods))
            except ConfigError as error:
                refusals[interval_s] = error
                del totals[interval_s]
    if not totals:  # of the interval that asks for the least: a short one ends soonest, a long one saves least often
        raise refusals[min(refusals) if math.isinf(job.deadline_s) else max(refusals)]
    return min(totals, key=totals.__getitem__)


def spot_tornado(plan: SpotPlan, *, factor: float, num_samples: int) -> list[Swing]:
    """Mean cost if one assumption is `factor` times as small or as large, at the chosen interval: it is set before the
    truth is known. The same seeds for all, so that chance does not widen a bar.
    """
    job = plan.job
    values = {
        "hours of work": job.work_s / 3600,
        "stall of a checkpoint, s": job.costs.stall_s,
        "recovery, s": job.costs.recovery_s,
        "spot price, $/h": job.spot_usd,
    }
    if isinstance(job.availability, PoissonInterruptions):
        values["hours between interruptions"] = job.availability.mtbf_s / 3600
    if not math.isinf(job.deadline_s):
        values["on-demand price, $/h"] = job.on_demand_usd

    def evaluate(name: str, value: float) -> float:
        changed = _changed(job, name, value)
        return statistics.fmean(map(changed.cost, changed.outcomes(plan.interval_s, num_samples)))

    most = _most_that_fits(job, plan.interval_s)
    ranges = {
        name: (value / factor, max(value, min(value * factor, most.get(name, math.inf))))
        for name, value in values.items()
        if value
    }
    return tornado(ranges, evaluate)


def _most_that_fits(job: SpotJob, interval_s: float) -> dict[str, float]:
    """The largest values with which a deadline can be met, on demand at least: beyond them there is no cost but a
    failure.
    """
    if math.isinf(job.deadline_s):
        return {}
    costs, number = job.costs, num_checkpoints(job.work_s, interval_s)
    spare_s = 0.999 * (job.deadline_s - costs.recovery_s - job.work_s - number * costs.stall_s)  # rounding aside
    work_s = (job.deadline_s - costs.recovery_s) / (1 + costs.stall_s / interval_s) - interval_s
    return {
        "hours of work": work_s / 3600,
        "stall of a checkpoint, s": costs.stall_s + spare_s / number,
        "recovery, s": costs.recovery_s + spare_s,
    }


def _changed(job: SpotJob, name: str, value: float) -> SpotJob:
    match name:
        case "hours of work":
            return replace(job, work_s=value * 3600)
        case "stall of a checkpoint, s":
            return replace(job, costs=replace(job.costs, stall_s=value))
        case "recovery, s":
            return replace(job, costs=replace(job.costs, recovery_s=value))
        case "spot price, $/h":
            return replace(job, spot_usd=value)
        case "on-demand price, $/h":
            return replace(job, on_demand_usd=value)
        case _:
            assert isinstance(job.availability, PoissonInterruptions)
            return replace(job, availability=replace(job.availability, mtbf_s=value * 3600))
