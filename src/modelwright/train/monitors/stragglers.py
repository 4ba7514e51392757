"""A controller that finds ranks that compute slower than the others, and names them with their hosts.

What counts is a rank's own time, waiting for others left out; a straggler makes everyone's step long, its own work
alone tells who it is. Changes nothing about the training.
"""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from modelwright.core.errors import ConfigError
from modelwright.parallel.mesh import Mesh, World
from modelwright.train.objective import StepInfo

Report = Callable[[int, str, float, float, str], None]
"""Takes step, kind, value, limit and text: a line of the watch list."""
PROBE_DIM = 256


@dataclass(frozen=True, kw_only=True)
class StragglerConfig:
    """A rank is a straggler when its own time is more than `factor` times the median of all ranks in `patience`
    looks in a row; `every`: steps between looks (each sends one number per rank), 0 for none."""

    factor: float = 1.5
    patience: int = 3
    every: int = 10

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise ConfigError(f"factor: must be above 1, got {self.factor}; 1.5 is half as long again as the median")
        if self.patience < 1:
            raise ConfigError(f"patience: must be at least 1, got {self.patience}")
        if self.every < 0:
            raise ConfigError(f"every: must not be negative, got {self.every}; 0 never looks")


class Stragglers:
    """Every rank has one and shows it the same steps. The first rank reports: once when a rank becomes a straggler,
    once when it no longer is.

    own_time_s: seconds of this rank's own work since it was last asked.
    """

    def __init__(
        self,
        world: World,
        config: StragglerConfig,
        *,
        own_time_s: Callable[[], float],
        report: Report,
        host: str = "",
    ) -> None:
        self.every = config.every
        self.world = world
        self.config = config
        self.own_time_s = own_time_s
        self.report = report
        self.hosts = _all_hosts(world, host or socket.gethostname())
        self._num_looks = [0] * world.size

    @property
    def slow_ranks(self) -> list[int]:
        return [rank for rank, looks in enumerate(self._num_looks) if looks >= self.config.patience]

    def observe(self, info: StepInfo) -> None:
        mine = torch.tensor(self.own_time_s(), dtype=torch.float64, device=self.world.device)
        self.judge(info.step, self.world.all_gather(mine).tolist())

    def judge(self, step: int, times_s: Sequence[float]) -> None:
        """One look at every rank's own time. The same on all ranks."""
        median_s = statistics.median(times_s)
        limit_s = self.config.factor * median_s
        for rank, time_s in enumerate(times_s):
            before = self._num_looks[rank]
            self._num_looks[rank] = before + 1 if time_s > limit_s else 0
            if self._num_looks[rank] == self.config.patience:
                self._tell(step, rank, time_s, limit_s, f"computes {time_s / median_s:.1f} times as long as the median")
            elif before >= self.config.patience and not self._num_looks[rank]:
                self._tell(step, rank, time_s, limit_s, "keeps up again")

    def _tell(self, step: int, rank: int, time_s: float, limit_s: float, what: str) -> None:
        if self.world.is_first:
            self.report(step, "straggler", time_s, limit_s, f"rank {rank} on {self.hosts[rank]} {what}")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: ranks and hosts may be others after a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OwnTime:
    """Adds up a rank's own work; asked, it tells the mean per step and begins anew."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._num_steps = 0

    def add_step(self, seconds: float) -> None:
        self._total_s += seconds
        self._num_steps += 1

    def __call__(self) -> float:
        mean_s = self._total_s / max(1, self._num_steps)
        self._total_s, self._num_steps = 0.0, 0
        return mean_s


class SpeedProbe:
    """Seconds of a small fixed product, the fastest of a few: how fast the device is now, whatever the layout."""

    def __init__(self, device: torch.device, *, num_repeats: int = 5) -> None:
        self._factor = torch.full((PROBE_DIM, PROBE_DIM), 1.0 / PROBE_DIM, device=device)
        self._num_repeats = num_repeats

    def __call__(self) -> float:
        return min(self._once() for _ in range(self._num_repeats))

    def _once(self) -> float:
        self._settle()
        started = time.perf_counter()
        product = self._factor
        for _ in range(4):
            product = product @ self._factor
        self._settle()
        return time.perf_counter() - started

    def _settle(self) -> None:
        if self._factor.device.type == "cuda":
            torch.cuda.synchronize(self._factor.device)


def own_times_compare(mesh: Mesh) -> bool:
    """Whether all ranks do the same work and wait for nobody within it, so that `OwnTime` tells stragglers.

    Otherwise (layers shared or gathered while they compute, stages of a pipeline) take a `SpeedProbe`.
    """
    return mesh.is_only_data_parallel


def _all_hosts(world: World, host: str) -> list[str]:
    hosts = [host] * world.size
    if world.size > 1:
        dist.all_gather_object(hosts, host, group=world.group)
    return hosts
