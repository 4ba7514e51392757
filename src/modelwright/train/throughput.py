"""Counts the work of a step from its batch and times its phases; makes the step's record."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import World
from modelwright.train.flops import adapter_step_flops, dense_flops
from modelwright.train.objective import Batch
from modelwright.train.technique import StepInfo, Update


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counts of one global batch, before any of it is computed.

    num_tokens: without padding. model_flops: of forward and backward of these tokens: a token attends to itself and to
    what precedes it in its document; backward costs twice forward, less where weights are frozen; recomputation does
    not count. executed_flops: of a step that skips nothing, with padding, and a head for labels only.
    """

    num_tokens: int
    model_flops: float
    executed_flops: float

    @staticmethod
    def counts(model: Decoder, batch: Batch, own_flops: float = 0.0) -> list[float]:
        """This rank's counts, to be summed over the ranks for `of`. own_flops: `Objective.own_flops`."""
        real = batch.segments_BT >= 0
        contexts = ((batch.positions_BT + 1) * real).sum()
        executed = dense_flops(model.config, batch) + adapter_step_flops(
            model.config, model.adapters, num_tokens=batch.num_tokens, num_targets=batch.num_targets
        )
        return [float(real.sum()), float(contexts), float(executed) + own_flops, own_flops]

    @classmethod
    def of(cls, model: Decoder, sums: list[float]) -> "Work":
        num_tokens, contexts, executed, own_flops = sums
        # Backward makes two products for each of forward: for the input's gradient and for the weight's.
        model_flops = 3 * num_tokens * model.config.flops_per_token(contexts / max(1.0, num_tokens))
        model_flops += adapter_step_flops(model.config, model.adapters, num_tokens=num_tokens, num_targets=num_tokens)
        model_flops += own_flops
        return cls(num_tokens=int(num_tokens), model_flops=model_flops, executed_flops=executed)


@dataclass(eq=False)
class StepTimer:
    """Sums the seconds of named phases of one step."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: {"data_wait_s": 0.0, "compute_s": 0.0, "comm_s": 0.0})

    @contextmanager
    def measure(self, name: str) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


@dataclass(kw_only=True)
class Throughput:
    """Turns finished updates into `StepInfo`s. world: all ranks; num_updating: ranks that make one update together; if
    several updates are made concurrently, each is charged its share. peak_flops: matrix-product rate of one rank in
    FLOP/s, 0 if unknown.
    """

    world: World
    num_updating: int
    peak_flops: float

    def describe(
        self, update: Update, work: Work, timer: StepTimer, *, learning_rate: float, scalars: Mapping[str, float]
    ) -> StepInfo:
        """Returns the finished step. The trainer counts the bytes sent, because not all of them belong to a step."""
        seconds = {**timer.seconds, "step_time_s": time.perf_counter() - timer.started}
        times = {name: value * self.num_updating / self.world.size for name, value in seconds.items()}
        return StepInfo(
            step=update.step + 1,
            loss=update.loss,
            losses=update.losses,
            grad_norm=update.grad_norm,
            learning_rate=learning_rate,
            num_tokens=work.num_tokens,
            tokens_per_s=work.num_tokens / times["step_time_s"],
            mfu=self.utilization(update.model_flops, times["step_time_s"]),
            model_flops=update.model_flops,
            peak_flops=self.peak_flops,
            **times,
            skip_reason=update.skip_reason,
            bytes_sent=None,
            scalars={**update.metrics, **scalars},
        )

    def utilization(self, flops: float, time_s: float) -> float:
        """Share of the peak rate; 0 without one."""
        if not (self.peak_flops and time_s):
            return 0.0
        reached = flops / time_s / self.world.size
        self.peak_flops = max(self.peak_flops, reached)  # a faster step shows that the peak was measured too low
        return reached / self.peak_flops
