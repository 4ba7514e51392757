"""What a run would have cost on rented instances: a workload from its time and its artifacts.

How often a run was interrupted, as a rate to plan with.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from scipy.stats import chi2

from modelwright.core.errors import ConfigError
from modelwright.core.records import column, read_records
from modelwright.core.rundir import RunDir, read_attempts
from modelwright.pipeline.run_config import previous_config
from modelwright.train.monitors.energy import ENERGY_FILE, read_energy, total_energy
from modelwright.train.monitors.recovery_time import ANNOUNCED, FAULT, RECOVERIES_FILE
from modelwright_plan.cost.prices import Purchase
from modelwright_plan.cost.workload import StorageUse, TrainingUse, Workload


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """Interruptions of a run while it trained."""

    num_faults: int
    """Interruptions without a word."""
    num_announced: int
    """Interruptions that SIGTERM announced."""
    hours: float
    """Time of training processes, repeated work included, without the last seconds before a fault; above 0."""

    @property
    def count(self) -> int:
        return self.num_faults + self.num_announced

    @property
    def per_hour(self) -> float:
        """The mean rate."""
        return self.count / self.hours

    @property
    def interval(self) -> tuple[float, float]:
        """The exact 95% interval of a Poisson rate, per hour (Garwood 1936)."""
        low = float(chi2.ppf(0.025, 2 * self.count)) / 2 if self.count else 0.0
        return low / self.hours, float(chi2.ppf(0.975, 2 * self.count + 2)) / 2 / self.hours

    @property
    def text(self) -> str:
        """How sure the rate is."""
        low, high = self.interval
        announced = f", {self.num_announced} of them announced" if self.num_announced else ""
        return (
            f"measured: {self.count} in {self.hours:.3g} h of training{announced}; 95% confidence: {low:.3g} to "
            f"{high:.3g} an hour"
        )


HOUR_S = 3600
NONE_SEEN = 3.0
"""Without interruptions the rate is, with 95% confidence, at most that of so many (the rule of three, Hanley and
Lippman-Hand, JAMA 1983)."""


def workload_of_run(
    run: RunDir, *, provider: str, region: str, instance: str, purchase: Purchase, count: int, months: float
) -> Workload:
    """The run's measured time on so many instances, as if they were as fast as the machine that it ran on, and its
    folder in hot storage for some months. Raises `ConfigError` if no stage has run.
    """
    config = previous_config(run)
    stages = config.stages if config else ()
    seconds = {spec.name: sum(entry["wall_s"] for entry in read_attempts(run.stage(spec.name))) for spec in stages}
    training = [
        TrainingUse(name=name, instance=instance, purchase=purchase, count=count, hours=wall_s / HOUR_S)
        for name, wall_s in seconds.items()
        if wall_s
    ]
    if not training:
        raise ConfigError(f"{run.path}: no stage of this run has finished an attempt; run it first")
    size_bytes = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    storage = (StorageUse(name="run folder", size_bytes=size_bytes, months=months),) if months else ()
    return Workload(
        name=run.path.name,
        provider=provider,
        region=region,
        training=tuple(training),
        storage=storage,
    )


def measured_stall_s(run: RunDir) -> float:
    """Median seconds that training stood still for a checkpoint. Raises `ConfigError` if none was saved."""
    files = sorted(run.path.glob("*/metrics.jsonl"))
    stalls = [stall for path in files for _, stall in column(read_records(path), "checkpoint_stall_s")]
    if not stalls:
        raise ConfigError(f"--run: {run.path} has saved no checkpoint; give --stall-s")
    return statistics.median(stalls)


def measured_recovery_s(run: RunDir) -> float | None:
    """Mean seconds from an interruption to the first step after it, without those that were announced: a run that is
    told to stop also waits. None if none was survived.
    """
    down = [record["down_s"] for record in _recoveries(run) if _kind(record) == FAULT]
    return statistics.fmean(down) if down else None


def measured_rate(run: RunDir) -> MeasuredRate:
    """How often the run's trainings were interrupted. Raises `ConfigError` if it has not trained, or was never
    interrupted: what the run then bounds is the rate, and the shorter the run, the less that says about the instances.
    """
    entries = [entry for path in sorted(run.path.glob(f"*/{ENERGY_FILE}")) for entry in read_energy(path)]
    seconds = total_energy(entries).seconds
    if not seconds:
        raise ConfigError(f"--run: {run.path} has trained nothing; give --interruptions-per-hour")
    kinds = [_kind(record) for record in _recoveries(run)]
    hours = seconds / HOUR_S
    if not kinds:
        raise ConfigError(
            f"--run: {run.path} was not interrupted in {hours:.3g} h of training, so the rate is unknown (95% "
            f"confidence: below {NONE_SEEN / hours:.3g} an hour); give --interruptions-per-hour"
        )
    num_announced = kinds.count(ANNOUNCED)
    return MeasuredRate(num_faults=len(kinds) - num_announced, num_announced=num_announced, hours=hours)


def _recoveries(run: RunDir) -> list[dict[str, Any]]:
    return [record for path in sorted(run.path.glob(f"*/{RECOVERIES_FILE}")) for record in read_records(path)]


def _kind(record: dict[str, Any]) -> str:
    """Runs of earlier versions recorded faults only."""
    return record.get("kind", FAULT)
