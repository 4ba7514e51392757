"""Finds ranks that compute slower than the others, and names them with their hosts.

It compares each rank's own time, excluding waiting: a straggler makes everyone's step long, and only its own work
identifies it.
"""

import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from modelwright.core.config import ConfigError, constant
from modelwright.ops.microbenchmark import repeated, seconds_of
from modelwright.parallel.mesh import World
from modelwright.train.technique import Runtime, StepInfo, Technique

PROBE_DIM = 256
"""Width of the probe's square matrix: 256 KiB in FP32, so that the probe measures computing, not memory."""


@dataclass(frozen=True, kw_only=True)
class StragglerConfig:
    """Thresholds at which a rank is reported as a straggler."""

    factor: float = constant(1.5)
    """Multiple of the median compute time of all ranks above which a rank is slow."""
    patience: int = constant(3)
    """Comparisons in a row that must find a rank slow."""
    every_steps: int = constant(10)
    """Steps between comparisons, each of which sends one number per rank; 0 disables the check."""

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise ConfigError(f"factor: must be above 1, got {self.factor}; 1.5 is 50% above the median")
        if self.patience < 1:
            raise ConfigError(f"patience: must be at least 1, got {self.patience}")
        if self.every_steps < 0:
            raise ConfigError(f"every_steps: must not be negative, got {self.every_steps}; 0 disables the check")


class Stragglers:
    """Every rank has one and passes it the same steps. The first rank reports when a rank becomes a straggler and when
    it recovers. own_time_s: seconds of this rank's own work since the last call.
    """

    def __init__(
        self,
        world: World,
        config: StragglerConfig,
        *,
        own_time_s: Callable[[], float],
        report: Callable[[int, str, float, float, str], None],
        host: str = "",
    ) -> None:
        self.world = world
        self.config = config
        self.own_time_s = own_time_s
        self.report = report
        self.hosts: list[str] = world.gather_json(host or socket.gethostname())
        self._num_looks = [0] * world.size

    def look(self, step: int) -> None:
        """Compare the ranks now."""
        local = torch.tensor(self.own_time_s(), dtype=torch.float64, device=self.world.device)
        self.judge(step, [float(time_s) for time_s in self.world.all_gather(local).cpu()])

    def judge(self, step: int, times_s: Sequence[float]) -> None:
        """Compare the own times of all ranks, [ranks], with the same result on each of them."""
        median_s = statistics.median(times_s)
        limit_s = self.config.factor * median_s
        for rank, time_s in enumerate(times_s):
            before, what = self._num_looks[rank], ""
            self._num_looks[rank] = before + 1 if time_s > limit_s else 0
            if self._num_looks[rank] == self.config.patience:
                what = f"computes {time_s / median_s:.1f} times as long as the median"
            elif before >= self.config.patience and not self._num_looks[rank]:
                what = "keeps up again"
            if what and self.world.is_first:
                self.report(step, "straggler", time_s, limit_s, f"rank {rank} on {self.hosts[rank]} {what}")


@dataclass(eq=False)
class OwnTime:
    """Sums a rank's own work; a call returns the mean per step and resets it."""

    _total_s: float = 0.0
    _num_steps: int = 0

    def add_step(self, seconds: float) -> None:
        self._total_s += seconds
        self._num_steps += 1

    def __call__(self) -> float:
        mean_s = self._total_s / max(1, self._num_steps)
        self._total_s, self._num_steps = 0.0, 0
        return mean_s


class SpeedProbe:
    """Measures the present speed of the device, whatever the layout: seconds of a small fixed matrix product."""

    def __init__(self, device: torch.device, *, num_repeats: int = 5) -> None:
        self._factor = torch.full((PROBE_DIM, PROBE_DIM), 1.0 / PROBE_DIM, device=device)
        self._num_repeats = num_repeats

    def __call__(self) -> float:
        # The fastest, because other work on the host can only make a repetition slower.
        one = self._factor
        return min(
            repeated(lambda: seconds_of(lambda: one @ one @ one @ one @ one, one.device), num_rounds=self._num_repeats)
        )


def straggler_monitor(config: StragglerConfig, run: Runtime) -> Technique | None:
    """Compares the ranks every `config.every_steps` steps: their seconds in forward and backward if these are
    comparable, else a `SpeedProbe`. None for ranks that do not wait for one another.
    """
    if run.world.size == 1 or not config.every_steps or run.mesh.world.size < run.world.size:
        return None
    own_time = OwnTime()
    # Own times identify stragglers if all ranks do the same work without waiting inside it, not where layers are
    # sharded or gathered while they compute, or are stages of a pipeline. Kernels of a GPU outlast the host's clock.
    compares = run.global_mesh.is_only_data_parallel and run.world.device.type == "cpu"
    measure = own_time if compares else SpeedProbe(run.world.device)
    stragglers = Stragglers(run.world, config, own_time_s=measure, report=run.report)

    def on_step_end(info: StepInfo) -> None:
        own_time.add_step(info.compute_s)
        if info.step % config.every_steps == 0:
            stragglers.look(info.step)

    return Technique(name="stragglers", on_step_end=on_step_end, needs=frozenset())
