"""Settings of fault detection and tolerance; `train/build.py` lists the monitors with the other techniques."""

from dataclasses import dataclass, field

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.train.monitors.stragglers import StragglerConfig
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
    on_out_of_memory: WhenOutOfMemory = constant("halve_microbatch")
    """`halve_microbatch` retries the step with half as many rows per microbatch and continues with those, where a
    failed step leaves no rank waiting; `fail` ends the run."""
    stragglers: StragglerConfig = field(default_factory=StragglerConfig)

    def __post_init__(self) -> None:
        for name in ("replica_check_every_steps", "watchdog_timeout_s", "in_memory_checkpoint_every_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 disables it")
