"""What a run would have cost on rented instances: a workload from its time and its artifacts."""

from modelwright.core.errors import ConfigError
from modelwright.core.rundir import RunDir
from modelwright.pipeline.run import previous_config
from modelwright.pipeline.stage_log import read_attempts
from modelwright.plan.cost.prices import Purchase
from modelwright.plan.cost.workload import StorageUse, TrainingUse, Workload

HOUR_S = 3600


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
