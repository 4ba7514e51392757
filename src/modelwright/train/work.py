"""The work of a step: its rows (`BatchStream`), the FLOPs that they cost, and the time that they take.

FLOPs are computed from the batch. A token attends to itself and to earlier tokens of its document; backward costs twice
as much as forward.
"""

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.adapters import adapter_flops, projection_sizes
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.low_rank import AdapterConfig
from modelwright.parallel.mesh import World
from modelwright.train.objective import Batch, LaidOutForward, Objective
from modelwright.train.technique import Runtime, StepInfo, Update


@dataclass
class BatchStream:
    """This rank's rows of the global batches. Consecutive steps share an iterator of the objective."""

    objective: Objective
    run: Runtime
    next_step: int = -1
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))

    def __call__(self, step: int) -> Batch:
        if step != self.next_step:  # the first one, or the first after a resume
            data = self.run.mesh.data
            self.batches = self.objective.batches(self.run.model, first=step, rank=data.rank, world_size=data.size)
        self.next_step = step + 1
        batch, run = next(self.batches), self.run
        num_parts = run.runner.num_microbatches(batch.num_groups)
        forward_sums = LaidOutForward(run.executor, run.mesh, num_parts=num_parts, evaluating=run.formats.evaluating)
        return self.objective.measure(batch, run.model, forward_sums)


def attention_flops(shape: ModelConfig, batch: TokenBatch, layer: int) -> int:
    """FLOPs of one layer's scores and values, 2 per multiply-add."""
    contexts_BT = batch.positions_BT + 1
    if window := shape.window_of(layer):
        contexts_BT = contexts_BT.clamp(max=window)
    contexts = int((contexts_BT * (batch.segments_BT >= 0)).sum())
    return 4 * shape.num_heads * shape.head_dim * contexts


def all_attention_flops(shape: ModelConfig, batch: TokenBatch) -> int:
    """FLOPs of all layers' scores and values."""
    return sum(attention_flops(shape, batch, layer) for layer in range(shape.num_layers))


def head_flops(shape: ModelConfig, batch: TokenBatch) -> int:
    """FLOPs of the head; ignored labels cost none."""
    return 2 * batch.num_targets * shape.vocab_size * shape.model_dim


def adapter_step_flops(shape: ModelConfig, adapters: AdapterConfig, *, num_tokens: float, num_targets: float) -> float:
    """Change that adapters make to the FLOPs of forward and backward: their own products come in addition, and the
    gradients of the frozen weights are not computed. num_targets: tokens that reach the head.
    """
    if not adapters.r:
        return 0.0
    # Per parameter of a frozen weight, backward leaves out one product of 2 FLOPs: the weight's gradient.
    frozen = sum(2 * outputs * inputs for outputs, inputs in projection_sizes(shape).values())
    per_token = 3 * adapter_flops(shape, adapters) - frozen
    return num_tokens * per_token - num_targets * 2 * shape.vocab_size * shape.model_dim


def dense_flops(shape: ModelConfig, batch: TokenBatch) -> int:
    """FLOPs of a dense forward and backward pass, padding included, because it is computed too."""
    # Queries and outputs have all heads, keys and values the shared ones; the feed-forward has three matrices.
    attention = shape.model_dim * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    products = 2 * batch.num_tokens * (attention + 3 * shape.model_dim * shape.ffn_dim)
    return 3 * (shape.num_layers * products + all_attention_flops(shape, batch) + head_flops(shape, batch))


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
