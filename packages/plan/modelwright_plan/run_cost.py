"""Figures of a run for plans: its cost on rented instances as a workload, the stall of a checkpoint, the recovery after
an interruption, and the rate of interruptions.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from scipy.stats import chi2

from modelwright.core.artifacts import RunDir, read_attempts
from modelwright.core.config import ConfigError
from modelwright.core.records import column, read_records
from modelwright.pipeline.run_config import previous_config
from modelwright.train.monitors.energy import ENERGY_FILE, read_energy, total_energy
from modelwright.train.monitors.recovery_time import ANNOUNCED, FAULT, RECOVERIES_FILE
from modelwright_plan.cost.prices import Purchase
from modelwright_plan.cost.workload import StorageUse, TrainingUse, Workload


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """Rate of a run's interruptions during training."""

    num_faults: int
    """Interruptions without an announcement."""
    num_announced: int
    """Interruptions that SIGTERM announced."""
    hours: float
    """Time of training processes, repeated work included, without the last seconds before a fault; above 0."""

    @property
    def count(self) -> int:
        return self.num_faults + self.num_announced

    @property
    def per_hour(self) -> float:
        """Mean rate."""
        return self.count / self.hours

    @property
    def interval(self) -> tuple[float, float]:
        """Exact 95% interval of a Poisson rate, per hour (Garwood 1936)."""
        low = float(chi2.ppf(0.025, 2 * self.count)) / 2 if self.count else 0.0
        return low / self.hours, float(chi2.ppf(0.975, 2 * self.count + 2)) / 2 / self.hours

    @property
    def text(self) -> str:
        """The rate with its confidence interval, as text."""
        low, high = self.interval
        announced = f", {self.num_announced} of them announced" if self.num_announced else ""
        return (
            f"measured: {self.count} in {self.hours:.3g} h of training{announced}; 95% confidence: {low:.3g} to "
            f"{high:.3g} an hour"
        )


HOUR_S = 3600
NONE_SEEN = 3.0
"""Upper 95% confidence bound on the expected number of interruptions when none occurred (rule of three, Hanley and
Lippman-Hand, JAMA 1983)."""


def workload_of_run(
    run: RunDir, *, provider: str, region: str, instance: str, purchase: Purchase, count: int, months: float
) -> Workload:
    """Returns a workload of the run's measured time on `count` instances, assumed to be as fast as the machine of the
    run, and of its folder in hot storage for `months`. Raises `ConfigError` if no stage has run.
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
    """Returns the median stall of training for a checkpoint. Raises `ConfigError` if none was saved."""
    files = sorted(run.path.glob("*/metrics.jsonl"))
    stalls = [stall for path in files for _, stall in column(read_records(path), "checkpoint_stall_s")]
    if not stalls:
        raise ConfigError(f"--run: {run.path} has saved no checkpoint; give --stall-s")
    return statistics.median(stalls)


def measured_recovery_s(run: RunDir) -> float | None:
    """Returns the mean seconds from an interruption to the first step after it; None if the run recovered from none.
    Announced interruptions are left out, because a run that is told to stop also waits.
    """
    down = [record["down_s"] for kind, record in _recoveries(run) if kind == FAULT]
    return statistics.fmean(down) if down else None


def measured_rate(run: RunDir) -> MeasuredRate:
    """Returns the rate at which the run's trainings were interrupted. Raises `ConfigError` if it has not trained or was
    never interrupted: it then only bounds the rate, and the bound of a short run says little about the instances.
    """
    entries = [entry for path in sorted(run.path.glob(f"*/{ENERGY_FILE}")) for entry in read_energy(path)]
    seconds = total_energy(entries).seconds
    if not seconds:
        raise ConfigError(f"--run: {run.path} has trained nothing; give --interruptions-per-hour")
    kinds = [kind for kind, _ in _recoveries(run)]
    hours = seconds / HOUR_S
    if not kinds:
        raise ConfigError(
            f"--run: {run.path} was not interrupted in {hours:.3g} h of training, so the rate is unknown (95% "
            f"confidence: below {NONE_SEEN / hours:.3g} an hour); give --interruptions-per-hour"
        )
    num_announced = kinds.count(ANNOUNCED)
    return MeasuredRate(num_faults=len(kinds) - num_announced, num_announced=num_announced, hours=hours)


def _recoveries(run: RunDir) -> list[tuple[str, dict[str, Any]]]:
    # Runs of earlier versions recorded faults only, without a kind.
    return [
        (record.get("kind", FAULT), record)
        for path in sorted(run.path.glob(f"*/{RECOVERIES_FILE}"))
        for record in read_records(path)
    ]
