"""The monitors of a run, according to its configuration and this rank's role."""

from dataclasses import dataclass, field

from modelwright.core.config import constant
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
class FaultToleranceConfig:
    """Fault detection and tolerance."""

    replica_check_every_steps: int = constant(500)
    """Steps between bitwise comparisons of what several ranks hold; 0 for none."""
    watchdog_timeout_s: float = 1800.0
    """A process that finishes no step for this long writes its threads' stacks to `hang-<rank>.txt` and exits, so that
    a launcher can restart the run; 0 never."""
    in_memory_checkpoint_every_steps: int = 0
    """Steps between copies of the state in the hosts' memory (Gemini, Wang et al. 2023), from which a run recovers
    when they are newer than the checkpoint on disk; 0 for none."""
    on_out_of_memory: WhenOutOfMemory = "halve_microbatch"
    """`halve_microbatch` retries the step with half as many rows per microbatch and continues with those, where a
    failed step leaves no rank waiting; `fail` ends the run."""
    stragglers: StragglerConfig = field(default_factory=StragglerConfig)

    def __post_init__(self) -> None:
        for name in ("replica_check_every_steps", "watchdog_timeout_s", "in_memory_checkpoint_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 disables it")


def build_monitors(
    config: FaultToleranceConfig,
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
    if config.replica_check_every_steps and run.strategy.replicated() is not None:
        monitors.append(replica_check(run, every=config.replica_check_every_steps))
    if config.stragglers.every_steps and run.strategy.is_synchronous:
        monitors.append(straggler_monitor(config.stragglers, run))
    return monitors
