"""The controllers that every run has: the watch list, the clock of recoveries, the comparison of replicas, stragglers.

Which of them are there follows from the configuration and from what this rank is. Changes nothing about the training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.parallel.channel import Channel
from modelwright.parallel.elastic import num_restarts
from modelwright.parallel.mesh import Mesh
from modelwright.train.monitors.replica_check import ReplicaCheck
from modelwright.train.objective import Controller
from modelwright.train.techniques.out_of_memory import WhenOutOfMemory
from modelwright.train.monitors.recovery_time import Recovery
from modelwright.train.monitors.stragglers import OwnTime, SpeedProbe, StragglerConfig, Stragglers, own_times_compare
from modelwright.train.monitors.anomalies import Watch, WatchConfig


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


def standing_controllers(
    folder: Path,
    config: GuardConfig,
    watch: WatchConfig,
    everyone: Mesh,
    *,
    note: Callable[[str], None],
    replicas: Callable[[], Mapping[str, Tensor]] | None,
    own_time: OwnTime | None,
) -> dict[str, Controller]:
    """By the names of their state. Called on all ranks alike.

    replicas: what ranks hold in common, None where there is nothing to compare; own_time: of a rank's own work in its
    steps, None where ranks do not wait for each other.
    """
    world = everyone.world
    found: dict[str, Controller] = {}
    report = _nobody
    if world.is_first:
        found["watch"] = list_of_events = Watch(folder / "watch.jsonl", watch, note=note)
        report = list_of_events.report
        found["recovery"] = Recovery(folder / "recoveries.jsonl", num_ranks=world.size, restart=num_restarts())
    if world.size == 1:
        return found
    if config.replica_check_every and replicas is not None:
        found["replica_check"] = ReplicaCheck(Channel(world), replicas, every=config.replica_check_every)
    if config.stragglers.every and own_time is not None:
        compares = own_times_compare(everyone) and world.device.type == "cpu"  # a GPU's clock is not the host's
        measure = own_time if compares else SpeedProbe(world.device)
        found["stragglers"] = Stragglers(world, config.stragglers, own_time_s=measure, report=report)
    return found


def _nobody(step: int, kind: str, value: float, limit: float, text: str) -> None:
    """Only the first rank keeps a list."""
