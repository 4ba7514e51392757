"""A plan for the memory of a training step: what to recompute, what to offload and when to update, judged by traces.

The tensors that blocks save are chosen by `solve` under a budget for activations; a trace of the whole step,
including weights, gradients, head and update, shows the result. Optimizer in backward is used if it changes no weight.
The plan is a configuration: the second trace is of training with it. Covers one process, without communication.

A traced step is the one that training runs, made by the same builder (`train.build.build_step`): its second one, when
optimizer states exist. `compile` is left out, because the effect of fusion is not visible, and formats stay as they
start.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from modelwright.core.artifacts import StageDir
from modelwright.core.config import ConfigError, dump
from modelwright.core.progress import Progress, SilentProgress
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.ops import cpu_kernels
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.ops.microbenchmark import seconds_of
from modelwright.parallel.mesh import build_mesh, single
from modelwright.pipeline.estimate.cost import size
from modelwright.train.build import build_step
from modelwright.train.config import TrainConfig
from modelwright.train.job import Session, TrainJob
from modelwright.train.memory.activations import (
    ActivationCheckpointingConfig,
    Budget,
    Tier,
    block_choices,
    block_shape,
    head_workspace_bytes,
    least_budget,
    total_moved_bytes,
    total_recomputed_flops,
)
from modelwright.train.memory.checkpointing import segments_for
from modelwright.train.memory.offload import MOST_QUEUED_BYTES, READ_AHEAD, Nowhere, Store
from modelwright.train.memory.trace import MemoryTimeline, StepTrace, fake_model
from modelwright.train.objective import BatchSource, Objective
from modelwright.train.precision.policy import AdaptiveConfig

ObjectiveOf = Callable[[BatchSource], Objective]
MORE_COMPUTE = 0.2
"""Default share of a step's FLOPs that a plan may add."""
_CANDIDATES = 24
_AS_GOOD = 0.01
"""Difference between peaks, relative, that is not worth further computation."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A plan and its effect. before: timeline of the step as configured; after: timeline with `train`, which is the
    plan. more_flops: recomputed FLOPs of the plan as a share of the step's model FLOPs; present_flops: the same as
    configured; moved_bytes: bytes of activations that a step offloads and reads again.
    """

    before: MemoryTimeline
    after: MemoryTimeline
    train: TrainConfig
    present_flops: float
    more_flops: float
    moved_bytes: int

    @property
    def saved_share(self) -> float:
        """Fraction of the peak that the plan saves."""
        return 1.0 - self.after.peak_bytes / self.before.peak_bytes

    def settings(self, configured: TrainConfig) -> dict[str, object]:
        """Returns the settings that the plan changes in the configuration."""
        planned, present = dump(self.train), dump(configured)
        return {name: value for name, value in planned.items() if value != present[name]}


@dataclass(frozen=True, kw_only=True)
class OffloadTarget:
    """Destination of offloaded activations; flops_per_byte: as in `ActivationCheckpointingConfig`."""

    tier: Tier = "none"
    flops_per_byte: float = 0.0


NOWHERE = OffloadTarget()


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A way to run the step. cost: recomputation and offloading, as a share of the step's model FLOPs."""

    train: TrainConfig
    more_flops: float
    moved_bytes: int
    cost: float


def plan_step(
    model: ModelConfig,
    train: TrainConfig,
    objective_of: ObjectiveOf,
    *,
    seq_len: int,
    budget_bytes: int = 0,
    more_compute: float = MORE_COMPUTE,
    elsewhere: OffloadTarget = NOWHERE,
    progress: Progress = SilentProgress(),  # noqa: B008
) -> StepPlan:
    """Finds the least recomputation and offloading with a peak of at most `budget_bytes`; without a budget (0), with a
    peak within a hundredth of the lowest for `more_compute` of the step's FLOPs, where offloading counts as the FLOPs
    that could be computed meanwhile. The plan is the step as configured if that reaches the goal at no higher cost, and
    without a budget also if nothing within `more_compute` takes less memory.

    Traces do not include the gaps of a heap, which come on top of every peak.

    Raises `ConfigError` that names the lowest peak if the budget is too small.
    """
    present, candidates = _candidates(model, train, seq_len, elsewhere)
    numbers = itertools.count(1)

    @cache
    def trace(settings: TrainConfig) -> MemoryTimeline:
        result = trace_step(model, settings, objective_of, seq_len=seq_len)
        progress.advance(next(numbers))
        return result

    # One after the other, because peaks need not fall along the candidates: a frozen prefix saves nothing that could be
    # recomputed.
    progress.begin("trace", 1 + len(candidates), "steps")
    before = trace(train)
    most, may_rise = budget_bytes, budget_bytes > 0
    if not budget_bytes:
        candidates = [one for one in candidates if one.cost <= more_compute]
        lowest = min(trace(one.train).peak_bytes for one in candidates)
        most, may_rise = int((1.0 + _AS_GOOD) * lowest), lowest < before.peak_bytes
    chosen = next((one for one in candidates if trace(one.train).peak_bytes <= most), present)
    if before.peak_bytes <= most and (present.cost <= chosen.cost or not may_rise):
        chosen = present
    after = trace(chosen.train)
    if after.peak_bytes > most:
        lowest = min(trace(one.train).peak_bytes for one in (present, *candidates))
        progress.end()
        alone = elsewhere == NOWHERE
        how = "recomputing" if alone else "recomputing and moving"
        more = ", or let activations wait elsewhere (--offload)" if alone else ""
        raise ConfigError(
            f"budget: {size(budget_bytes)} is not enough; the lowest peak that {how} reaches is {size(lowest)} "
            f"({lowest}); use smaller microbatches, or divide the states (parallel.zero_stage){more}"
        )
    progress.end()
    return StepPlan(
        before=before,
        after=after,
        train=chosen.train,
        present_flops=present.more_flops,
        more_flops=chosen.more_flops,
        moved_bytes=chosen.moved_bytes,
    )


def leanest_step(model: ModelConfig, train: TrainConfig, *, seq_len: int) -> TrainConfig:
    """Returns the step of the least memory by recomputation and updates in backward, whatever it costs: the last of
    `plan_step`'s candidates. Nothing is traced, so that very deep models take no time.
    """
    return _candidates(model, train, seq_len, NOWHERE)[1][-1].train


def _candidates(
    model: ModelConfig, train: TrainConfig, seq_len: int, elsewhere: OffloadTarget
) -> tuple[_Candidate, Sequence[_Candidate]]:
    """Returns the step as configured, and ways to treat the blocks from no recomputation to the least memory, whatever
    is configured.
    """
    compute, fused = train.precision.planned_as, cpu_kernels.are_used_on("cpu")
    shape = block_shape(model, compute=compute, mean_context=model.max_seq_len / 2, fused=fused)
    num_tokens = train.batch_rows(seq_len) * seq_len // train.gradient_accumulation_steps
    end_bytes = head_workspace_bytes(model, num_tokens=num_tokens, chunk_tokens=CHUNK_TOKENS)
    whole = num_tokens * (model.num_layers * shape.whole_bytes + shape.workspace_bytes) + end_bytes
    choices = block_choices(shape, num_tokens, model.num_layers, flops_per_byte=elsewhere.flops_per_byte)
    least = least_budget(choices, model.num_layers, Budget(num_bytes=whole, end_bytes=end_bytes))
    budgets = [whole - (whole - least) * step // _CANDIDATES for step in range(_CANDIDATES + 1)]
    flops = 3.0 * model.flops_per_token(seq_len / 2)

    def candidate(way: TrainConfig) -> _Candidate:
        segments = segments_for(
            way.activation_checkpointing, model.num_layers, shape=shape, num_tokens=num_tokens, end_bytes=end_bytes
        )
        again, moved = total_recomputed_flops(shape, segments) / flops, total_moved_bytes(shape, segments)
        return _Candidate(
            train=way,
            more_flops=again,
            moved_bytes=moved * num_tokens * train.gradient_accumulation_steps,
            cost=again + moved * elsewhere.flops_per_byte / flops,
        )

    folder = train.activation_checkpointing.offload_dir if elsewhere.tier == "disk" else ""
    # Optimizer in backward, if the settings allow it; clipping by the norm would need all gradients first.
    lean = train
    if not train.max_grad_norm:
        with suppress(ConfigError):
            lean = replace(train, optimizer_in_backward=True)
    result = [candidate(replace(lean, activation_checkpointing=ActivationCheckpointingConfig()))]
    for budget in budgets:
        config = ActivationCheckpointingConfig(
            mode="budget",
            budget_bytes=budget,
            offload=elsewhere.tier,
            offload_dir=folder,
            flops_per_byte=elsewhere.flops_per_byte,
        )
        next_one = candidate(replace(lean, activation_checkpointing=config))
        if next_one.cost > result[-1].cost:
            result.append(next_one)
    return candidate(train), result


@dataclass(frozen=True)
class SameRows:
    """A loader that always returns the same batch: each row is one document, and every token but the row's last is
    predicted.
    """

    rows: TokenBatch
    num_batches_per_epoch: int = 1

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        return self.rows


def trace_step(
    model: ModelConfig, train: TrainConfig, objective_of: ObjectiveOf, *, seq_len: int, fake: bool = True
) -> MemoryTimeline:
    """Traces one step of one process on the CPU; returns its memory over time. fake: computes and allocates nothing.
    Raises `ConfigError` if the batch does not divide into rows and microbatches.
    """
    if train.precision.policy == "auto":
        raise ConfigError("precision.policy: 'auto' is not resolved yet; set fp32 or bf16_mixed")
    train = replace(train, precision=replace(train.precision, adaptive=AdaptiveConfig()))
    rows = train.batch_rows(seq_len)
    decoder = fake_model(lambda: Decoder(model)) if fake else Decoder(model)
    assert isinstance(decoder, Decoder)
    if not fake:
        decoder.init_weights(0)
    decoder.base_fingerprint = "fake"  # fake weights have no values with which adapters could be compared
    trace = StepTrace(decoder)
    with ExitStack() as exit_stack, trace.places():
        world = single()
        # Token ids do not matter to memory; labels that do not count do.
        tokens_BT = torch.arange(rows * seq_len).view(rows, seq_len) % model.vocab_size
        labels_BT = tokens_BT.roll(-1, dims=1)
        labels_BT[:, -1] = IGNORED
        batch = TokenBatch(
            input_ids_BT=tokens_BT,
            labels_BT=labels_BT,
            positions_BT=torch.arange(seq_len).repeat(rows, 1),
            segments_BT=torch.zeros(rows, seq_len, dtype=torch.int32),
        )
        job = TrainJob(
            model=decoder,
            objective=objective_of(SameRows(batch)),
            config=replace(train, compile=False, batch_tokens=rows * seq_len),
            stage=StageDir(Path(os.devnull)),
            num_steps=2,
            # Norms of a large model take a great many small temporary tensors, and have no value on fake ones.
            measure_grad_norm=False,
        )
        store = Nowhere(queued_bytes=MOST_QUEUED_BYTES, read_ahead=READ_AHEAD)
        session = Session.untracked(world, store)
        parts = build_step(job, build_mesh(world, job.parallel), session, exit_stack)
        with trace:
            parts.run.strategy.begin(0, 2)
            parts.run.model.train()
            parts.one_step(0)
            trace.begin()
            parts.one_step(1)
            timeline = trace.timeline()
    return timeline


NUM_TENSORS, TENSOR_BYTES = 32, 8 * 2**20


def measure_flops_per_byte(store: Store, device: torch.device, flops_per_s: float) -> float:
    """Measures the FLOPs that could be computed while a byte moves to or from the store. flops_per_s: rate of a
    training step. Files pass through the page cache, as they do in training.
    """
    tensors = [torch.ones(TENSOR_BYTES // 4, device=device) for _ in range(NUM_TENSORS)]

    def move_all() -> None:
        fetches = [store.put(one) for one in tensors]
        for fetch in reversed(fetches):
            fetch()

    return flops_per_s * seconds_of(move_all, device) / (2 * NUM_TENSORS * TENSOR_BYTES)
