"""A layout of a training job over its devices: the memory of its ranks, and the bytes that they send along each axis.

Ring algorithms: an all-gather or reduce-scatter of S bytes over n ranks sends (n - 1) / n * S from each, an all-reduce
twice that. Traffic follows the model passes: FSDP2 as `parallel.zero_stage` sets it up, FP32 weights and gradients;
tensor parallelism as Shoeybi et al. 2019 and, with sequence parallelism, Korthikanti et al. 2022 (equal bytes).

`planned` expresses a run's training in these terms: the job, and its layout over the processes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.pipeline.balance import flop_costs, split_layers
from modelwright.parallel.pipeline.stages import microbatches_in_flight, rank_of_stage
from modelwright.parallel.topology.links import AxisTraffic
from modelwright.pipeline.estimate import cost
from modelwright.pipeline.stage import RunConfig
from modelwright.pipeline.stages.pack import PACK
from modelwright.train.config import TrainConfig
from modelwright.train.memory.activations import (
    FP32_BYTES,
    ActivationCheckpointingConfig,
    Compute,
    Segment,
    block_shape,
)
from modelwright.train.memory.checkpointing import segments_for

ComputeFormat = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
"""Number format of matrix products."""
PLANNED_AS: dict[ComputeFormat, Compute] = {
    "fp32": "fp32",
    "tf32": "fp32",
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "bf16",
}
"""Format in which the results of products are stored."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A model in training on rows of `seq_len` tokens, with `batch_tokens` tokens in an update."""

    model: ModelConfig
    seq_len: int
    batch_tokens: int
    compute: ComputeFormat = "bf16"

    @property
    def num_rows(self) -> int:
        return self.batch_tokens // self.seq_len


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a job over devices; `microbatch_rows`: rows of one replica of the model at a time."""

    parallel: ParallelConfig
    num_devices: int
    microbatch_rows: int
    activations: ActivationCheckpointingConfig

    @property
    def axes(self) -> dict[str, int]:
        return self.parallel.axes(self.num_devices)

    @property
    def copies(self) -> int:
        """Number of replicas of the model, each with its own rows."""
        return self.axes["replicate"] * self.axes["shard"]


def fullest_memory(job: TrainingJob, layout: Layout) -> cost.MemoryEstimate:
    """Returns the memory of the layout's fullest rank, that of the process included. Raises `ConfigError` if the layout
    does not divide the model or the batch.
    """
    parts = rank_parts(job, layout).values()
    return max((cost.rank_memory(job.model, part) for part in parts), key=lambda memory: memory.total)


def expected_traffic(job: TrainingJob, layout: Layout) -> dict[str, AxisTraffic]:
    """Returns the traffic in a step of the first rank with the most layers, on each hop of every axis of more than one
    rank. Raises `ConfigError` like `fullest_memory`.
    """
    part = max(rank_parts(job, layout).values(), key=lambda part: part.num_layers)
    result = {}
    for axis, size in layout.axes.items():
        if size > 1:
            num_bytes, num_messages = sent_along(axis, job.model, part, layout.axes)
            result[axis] = AxisTraffic(num_messages=num_messages, num_bytes=num_bytes / num_messages)
    return result


def rank_parts(job: TrainingJob, layout: Layout) -> dict[int, cost.RankPart]:
    """Returns the parts of the pipeline's ranks that can be fullest or slowest: those with embedding and head, and the
    first of those with most layers (earlier ranks hold more microbatches). Raises `ConfigError` like `fullest_memory`.
    """
    parallel, axes, layers = layout.parallel, layout.axes, layers_per_stage(job, layout)
    owners, held = rank_of_stage(parallel), [0] * parallel.pipeline
    for stage, owner in enumerate(owners):
        held[owner] += layers[stage]
    num_microbatches = job.num_rows // (layout.copies * layout.microbatch_rows)
    shape = block_shape(
        job.model,
        compute=PLANNED_AS[job.compute],
        mean_context=job.seq_len / 2,
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
    )
    parts: dict[int, cost.RankPart] = {}
    for rank in sorted({owners[0], owners[-1], held.index(max(held))}):
        stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        num_layers = held[rank]
        in_flight = microbatches_in_flight(
            parallel.schedule,
            pipeline=parallel.pipeline,
            rank=rank,
            stages_per_rank=parallel.stages_per_rank,
            num_microbatches=num_microbatches,
        )
        part = cost.RankPart(
            segments=(Segment(num_layers=num_layers, recompute=False),) if num_layers else (),
            shape=shape,
            num_tokens=layout.microbatch_rows * job.seq_len // axes["context"],
            num_microbatches=num_microbatches,
            in_flight=in_flight,
            has_embedding=0 in stages,
            has_head=len(layers) - 1 in stages,
            tensor=parallel.tensor,
            zero_stage=parallel.zero_stage,
            sharing=axes["shard"] * axes["context"],
            # The ranks of a context see different tokens: without sharding they sum gradients like replicas.
            copies=axes["replicate"] * (axes["context"] if parallel.zero_stage == 0 else 1),
        )
        segments = segments_for(
            layout.activations,
            num_layers,
            shape=shape,
            num_tokens=part.num_tokens,
            in_flight=math.ceil(in_flight),
            end_bytes=cost.head_workspace(job.model, part),
        )
        parts[rank] = replace(part, segments=tuple(segments))
    return parts


def layers_per_stage(job: TrainingJob, layout: Layout) -> tuple[int, ...]:
    """Returns the layers of each pipeline stage, as configured or as training would split them."""
    parallel = layout.parallel
    return parallel.layers_per_stage or _split(job.model, parallel.pipeline * parallel.stages_per_rank, job.seq_len)


@lru_cache
def _split(model: ModelConfig, num_stages: int, seq_len: int) -> tuple[int, ...]:
    # Cached: a search of layouts asks for the same split thousands of times.
    return split_layers(flop_costs(model, mean_context=seq_len / 2), num_stages)


def sent_along(axis: str, model: ModelConfig, part: cost.RankPart, axes: Mapping[str, int]) -> tuple[float, float]:
    """Returns the bytes that one rank sends along an axis in a step, and its number of sequential messages."""
    ranks, rounds = axes[axis], part.num_microbatches
    share = (ranks - 1) / ranks
    weights = FP32_BYTES * (
        cost.root_parameters(model, part) + part.num_layers * cost.block_parameters(model, part.tensor)
    )
    stream = part.num_tokens * model.model_dim * part.shape.width
    if axis == "tensor":
        # Two sums in a block's forward pass, two in its backward, and again what is computed again.
        again = sum(segment.num_layers for segment in part.segments if segment.recompute)
        sums = 4 * part.num_layers + 2 * again
        return rounds * sums * 2 * share * stream, rounds * sums * 2 * (ranks - 1)
    if axis == "context":
        # Keys and values travel around the ring in the forward pass, with their gradients in the backward pass.
        pairs = part.num_tokens * 2 * part.shape.kv_dim * part.shape.width
        return rounds * part.num_layers * 3 * (ranks - 1) * pairs, rounds * part.num_layers * 3 * (ranks - 1)
    if axis == "shard":
        # Stage 3 gathers weights forward and backward and scatters gradients, for every microbatch; stage 2 gathers
        # them once for every microbatch; stage 1 scatters gradients once per step.
        fetches = rounds * (2 if part.zero_stage == 3 else 1)
        scatters = 1 if part.zero_stage == 1 else rounds
        return (fetches + scatters) * share * weights, (fetches + scatters) * (part.num_layers + 1) * (ranks - 1)
    if axis == "replicate":
        return 2 * share * weights / part.pieces, 2 * (ranks - 1)
    return rounds * 2 * stream / part.tensor, rounds * 2


def planned(
    config: RunConfig, training: TrainConfig, layout: ParallelConfig, num_processes: int
) -> tuple[TrainingJob, Layout]:
    """Returns the job and layout of a training stage. Raises `ConfigError` if the layout does not divide the batch."""
    copies = training.num_copies(layout.axes(num_processes))
    seq_len = config.section(PACK).seq_len
    rows = training.batch_rows(seq_len, num_copies=copies)
    job = TrainingJob(
        model=config.model, seq_len=seq_len, batch_tokens=training.batch_tokens, compute=training.precision.planned_as
    )
    placed = Layout(
        parallel=layout,
        num_devices=num_processes,
        microbatch_rows=rows // (copies * training.gradient_accumulation_steps),
        activations=training.activation_checkpointing,
    )
    return job, placed
