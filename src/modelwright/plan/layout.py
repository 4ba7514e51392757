"""One layout of a training job over a cluster: memory of its fullest rank, and how long a step takes.

Time is compute at the share of the peak rate that published runs reach, plus the pipeline's bubble, plus communication
that is not overlapped. Estimates rank layouts; they do not replace a measurement.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from modelwright.memory.activations import BlockShape, Segment, block_shape, total_recomputed_flops
from modelwright.memory.checkpointing import segments_for
from modelwright.memory.config import ActivationCheckpointingConfig
from modelwright.model.config import ModelConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.pipeline.bubble import StageTime, bubble_s
from modelwright.parallel.pipeline.partition import flop_costs, split_layers
from modelwright.parallel.pipeline.schedule import bubble_share, microbatches_in_flight
from modelwright.parallel.pipeline.stages import rank_of_stage
from modelwright.parallel.topology.rank_mapping import AxisTraffic
from modelwright.plan.catalog import PLANNED_AS, ComputeFormat
from modelwright.plan.communication import Cluster, axis_seconds, axis_traffic
from modelwright.plan.memory import MemoryEstimate, RankPart, head_workspace, rank_memory


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What is trained: rows of `seq_len` tokens, `batch_tokens` to an update."""

    model: ModelConfig
    seq_len: int
    batch_tokens: int
    compute: ComputeFormat = "bf16"

    @property
    def num_rows(self) -> int:
        return self.batch_tokens // self.seq_len


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is laid out; `microbatch_rows`: rows of one replica of the model at a time."""

    parallel: ParallelConfig
    num_devices: int
    microbatch_rows: int
    activations: ActivationCheckpointingConfig

    @property
    def axes(self) -> dict[str, int]:
        return self.parallel.axes(self.num_devices)

    @property
    def copies(self) -> int:
        """Replicas of the model, each with its own rows."""
        return self.axes["replicate"] * self.axes["shard"]


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """A layout's fullest rank and its step time by part, in seconds; communication is the part that is not hidden."""

    layout: Layout
    memory: MemoryEstimate
    layers_per_stage: tuple[int, ...]
    num_microbatches: int
    compute_s: float
    recompute_s: float
    bubble_s: float
    communication_s: Mapping[str, float]
    model_flops: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.recompute_s + self.bubble_s + sum(self.communication_s.values())

    @property
    def bubble_share(self) -> float:
        return bubble_share(bubble=self.bubble_s, work=self.compute_s + self.recompute_s)

    def utilization(self, cluster: Cluster) -> float:
        """Model FLOPs as a share of the devices' peak."""
        return self.model_flops / (self.step_s * self.layout.num_devices * cluster.compute.peak_flops_per_s)


def assess(job: TrainingJob, layout: Layout, cluster: Cluster) -> Assessment:
    """Memory and time. Raises `ConfigError` if the layout does not divide the model or the batch."""
    parallel, axes = layout.parallel, layout.axes
    shape = _shape(job, layout)
    num_stages = parallel.pipeline * parallel.stages_per_rank
    layers = parallel.layers_per_stage or _split(job.model, num_stages, job.seq_len)
    num_microbatches = job.num_rows // (layout.copies * layout.microbatch_rows)
    ranks = _ranks_that_decide(layers, parallel)
    parts = {rank: _part(job, layout, shape, layers, rank, num_microbatches) for rank in ranks}
    fullest = max((rank_memory(job.model, part) for part in parts.values()), key=lambda memory: memory.total)
    tokens = layout.microbatch_rows * job.seq_len // axes["context"]
    token_s = tokens / cluster.flops_per_s
    forward = {rank: _forward_flops(job.model, part) for rank, part in parts.items()}
    again = {rank: total_recomputed_flops(shape, part.segments) for rank, part in parts.items()}
    slowest = max(ranks, key=lambda rank: 3 * forward[rank] + again[rank])
    forward_s, again_s = forward[slowest] * token_s, again[slowest] * token_s
    seconds = axis_seconds(job.model, parts[slowest], axes, cluster, compute_s=num_microbatches * 3 * forward_s)
    layer_again = again[slowest] / max(1, parts[slowest].num_layers)
    times = _stage_times(job.model, parts[slowest], layers, layer_again=layer_again, flop_s=token_s)
    waiting = bubble_s(parallel, times, num_microbatches)
    return Assessment(
        layout=layout,
        memory=fullest.on_device(cluster.device),
        layers_per_stage=layers,
        num_microbatches=num_microbatches,
        compute_s=num_microbatches * 3 * forward_s,
        recompute_s=num_microbatches * again_s,
        bubble_s=waiting,
        communication_s=seconds,
        model_flops=3 * job.batch_tokens * job.model.flops_per_token(job.seq_len / 2),
    )


def fullest_memory(job: TrainingJob, layout: Layout) -> MemoryEstimate:
    """Memory of the layout's fullest rank, of the process itself included. Raises `ConfigError` like `assess`."""
    parallel = layout.parallel
    layers = parallel.layers_per_stage or _split(job.model, parallel.pipeline * parallel.stages_per_rank, job.seq_len)
    num_microbatches = job.num_rows // (layout.copies * layout.microbatch_rows)
    shape = _shape(job, layout)
    ranks = _ranks_that_decide(layers, parallel)
    parts = [_part(job, layout, shape, layers, rank, num_microbatches) for rank in ranks]
    return max((rank_memory(job.model, part) for part in parts), key=lambda memory: memory.total)


def expected_traffic(job: TrainingJob, layout: Layout) -> dict[str, AxisTraffic]:
    """The traffic of a rank with the most layers along each axis in a step. Raises `ConfigError` like `assess`."""
    parallel = layout.parallel
    layers = parallel.layers_per_stage or _split(job.model, parallel.pipeline * parallel.stages_per_rank, job.seq_len)
    num_microbatches = job.num_rows // (layout.copies * layout.microbatch_rows)
    shape = _shape(job, layout)
    parts = [_part(job, layout, shape, layers, rank, num_microbatches) for rank in range(parallel.pipeline)]
    return axis_traffic(job.model, max(parts, key=lambda part: part.num_layers), layout.axes)


@lru_cache
def _split(model: ModelConfig, num_stages: int, seq_len: int) -> tuple[int, ...]:
    """The pipeline split that training would use."""
    return split_layers(flop_costs(model, mean_context=seq_len / 2), num_stages)


def _shape(job: TrainingJob, layout: Layout) -> BlockShape:
    parallel = layout.parallel
    return block_shape(
        job.model,
        compute=PLANNED_AS[job.compute],
        mean_context=job.seq_len / 2,
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
    )


def _part(
    job: TrainingJob, layout: Layout, shape: BlockShape, layers: tuple[int, ...], rank: int, num_microbatches: int
) -> RankPart:
    parallel, axes = layout.parallel, layout.axes
    stages = [stage for stage, owner in enumerate(rank_of_stage(parallel)) if owner == rank]
    num_layers = sum(layers[stage] for stage in stages)
    in_flight = microbatches_in_flight(
        parallel.schedule,
        pipeline=parallel.pipeline,
        rank=rank,
        stages_per_rank=parallel.stages_per_rank,
        num_microbatches=num_microbatches,
    )
    part = RankPart(
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
        copies=axes["replicate"] * (axes["context"] if parallel.zero_stage == 0 else 1),
    )
    segments = segments_for(
        layout.activations,
        num_layers,
        shape=shape,
        num_tokens=part.num_tokens,
        in_flight=math.ceil(in_flight),
        end_bytes=head_workspace(job.model, part),
    )
    return replace(part, segments=tuple(segments))


def _ranks_that_decide(layers: tuple[int, ...], parallel: ParallelConfig) -> list[int]:
    """The ranks that can be fullest or slowest: those with embedding and head, and the first of those with most layers
    (earlier ranks hold more microbatches).
    """
    owners, held = rank_of_stage(parallel), [0] * parallel.pipeline
    for stage, owner in enumerate(owners):
        held[owner] += layers[stage]
    return sorted({owners[0], owners[-1], held.index(max(held))})


def _forward_flops(model: ModelConfig, part: RankPart) -> float:
    """FLOPs of one token's forward pass on one rank."""
    return part.num_layers * part.shape.forward_flops + _head_flops(model, part) * part.has_head


def _head_flops(model: ModelConfig, part: RankPart) -> float:
    return 2.0 * model.vocab_size * model.model_dim / part.tensor


def _stage_times(
    model: ModelConfig, part: RankPart, layers: tuple[int, ...], *, layer_again: float, flop_s: float
) -> list[StageTime]:
    """Return the times of every stage.

    layer_again: FLOPs that one layer recomputes per token; flop_s: seconds for one FLOP on every token of a microbatch.
    Attention has no weights: its backward pass costs twice its forward pass, all of it for its inputs.
    """
    attend = part.shape.flops("attend")
    products = part.shape.forward_flops - attend
    times = []
    for stage, num_layers in enumerate(layers):
        head = _head_flops(model, part) if stage == len(layers) - 1 else 0.0
        times.append(
            StageTime(
                forward_s=flop_s * (num_layers * (products + attend) + head),
                input_s=flop_s * (num_layers * (products + 2 * attend + layer_again) + head),
                weight_s=flop_s * (num_layers * products + head),
            )
        )
    return times
