"""The monitors of a run, by its configuration and by what this rank is."""

from dataclasses import dataclass, field

from modelwright.core.errors import ConfigError
from modelwright.parallel.elastic import num_restarts
from modelwright.train.monitors.anomalies import AnomalyLog, anomaly_monitor
from modelwright.train.monitors.recovery_time import recovery_time
from modelwright.train.monitors.replica_check import replica_check
from modelwright.train.monitors.stragglers import StragglerConfig, straggler_monitor
from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique
from modelwright.train.techniques.out_of_memory import WhenOutOfMemory


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What looks after a run of several processes.

    replica_check_every: steps between comparisons of what several ranks hold, bit for bit, 0 for none; hang_after_s: a
    process that finishes no step for so long writes the stacks of its threads to `hang-<rank>.txt` and ends, so that a
    launcher can start the run again, 0 never; memory_every_steps: steps between copies of the state in the hosts'
    memory (on two hosts, where there are two), from which a run recovers when they are newer than what is on disk, 0
    for none; out_of_memory: `halve` makes a step whose forward or backward did not fit again in microbatches of
    half as many rows, and goes on with those (where no rank can be left waiting: one process, or copies of a model
    whose gradients are not sent amid backward; elsewhere a run says so when it begins), `stop` ends the run.
    """

    replica_check_every: int = 500
    hang_after_s: float = 1800.0
    memory_every_steps: int = 0
    out_of_memory: WhenOutOfMemory = "halve"
    stragglers: StragglerConfig = field(default_factory=StragglerConfig)

    def __post_init__(self) -> None:
        for name in ("replica_check_every", "hang_after_s", "memory_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 switches it off")


def build_monitors(
    config: GuardConfig,
    run: Runtime,
    anomalies: AnomalyLog | None,
) -> list[Technique]:
    """The monitors of one rank. Called on all ranks alike.

    anomalies: the list of events, on the first rank only.
    """
    world, monitors = run.world, list[Technique]()
    if anomalies is not None:
        monitors.append(anomaly_monitor(anomalies))
        monitors.append(recovery_time(run, num_ranks=world.size, restart=num_restarts()))
    if world.size == 1:
        return monitors
    if config.replica_check_every and run.strategy.replicated() is not None:
        monitors.append(replica_check(run, every=config.replica_check_every))
    if config.stragglers.every and run.strategy.is_synchronous:
        monitors.append(straggler_monitor(config.stragglers, run))
    return monitors
