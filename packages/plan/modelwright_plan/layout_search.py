"""Proposes layouts of a training job over a cluster: all that fit, fastest first, and why the others do not.

Tries every way to divide the devices among the axes, ZeRO stages over all copies or within hosts, schedules, sizes of
microbatches and ways to treat activations.

How long a step of one layout of a training job takes on a cluster, part by part.

Time is compute at the share of the peak rate that published runs reach, plus the pipeline's bubble, plus communication
that is not overlapped. Estimates rank layouts; they do not replace a measurement.

The devices and links that a layout is planned for, and the seconds that its messages take on them.

An axis whose ranks lie in one host uses the host's link, any other the network.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from modelwright.core.errors import ConfigError
from modelwright.model.config import ModelConfig
from modelwright.parallel.config import ParallelConfig, Schedule, ZeroStage
from modelwright.parallel.pipeline.stages import check_microbatches, is_v_shaped
from modelwright.pipeline.estimate.cost import MemoryEstimate, RankPart, rank_memory
from modelwright.pipeline.estimate.layout import Layout, TrainingJob, layers_per_stage, rank_parts, sent_along
from modelwright.train.memory.activations import ActivationCheckpointingConfig, total_recomputed_flops
from modelwright_plan.bubble import StageTime, bubble_s, bubble_share
from modelwright_plan.catalog import ComputeRate

OVERLAP = {"cuda": 0.8, "cpu": 0.0}
"""Share of compute under which FSDP's messages can hide: none over gloo, whose collectives wait for each other."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices and links: memory of one device, how fast it computes, bytes/s of one device's link in each direction,
    and the time until a message's first byte arrives."""

    num_hosts: int
    devices_per_host: int
    memory_bytes: float
    compute: ComputeRate
    host_bytes_per_s: float
    network_bytes_per_s: float
    host_latency_s: float = 5e-6
    network_latency_s: float = 2e-5
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("num_hosts", "devices_per_host", "memory_bytes", "host_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.network_bytes_per_s <= 0 and self.num_hosts > 1:
            raise ConfigError(f"network_bytes_per_s: must be above 0, got {self.network_bytes_per_s}")

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def flops_per_s(self) -> float:
        """FLOP/s that a device reaches in training if no rank waits for another."""
        return self.compute.peak_flops_per_s * self.compute.efficiency

    def seconds(self, num_bytes: float, num_messages: float, *, reach: int) -> float:
        """`reach`: how many neighboring ranks the axis spans from its first to its last rank."""
        inside = reach <= self.devices_per_host
        rate = self.host_bytes_per_s if inside else self.network_bytes_per_s
        return num_bytes / rate + num_messages * (self.host_latency_s if inside else self.network_latency_s)


def axis_seconds(
    model: ModelConfig, part: RankPart, axes: Mapping[str, int], cluster: Cluster, *, compute_s: float
) -> dict[str, float]:
    """Seconds of a step that a rank waits for each axis; axes of one rank are left out."""
    reach, result = 1, {}
    for axis in ("tensor", "context", "shard", "replicate", "pipeline"):
        reach *= axes[axis]
        if axes[axis] > 1:
            num_bytes, num_messages = sent_along(axis, model, part, axes)
            seconds = cluster.seconds(num_bytes, num_messages, reach=reach)
            if axis == "shard":
                seconds = max(0.0, seconds - OVERLAP[cluster.device] * compute_s)
            result[axis] = seconds
    return result


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
    axes, layers, parts = layout.axes, layers_per_stage(job, layout), rank_parts(job, layout)
    fullest = max((rank_memory(job.model, part) for part in parts.values()), key=lambda memory: memory.total)
    tokens = layout.microbatch_rows * job.seq_len // axes["context"]
    token_s = tokens / cluster.flops_per_s
    forward = {rank: _forward_flops(job.model, part) for rank, part in parts.items()}
    again = {rank: total_recomputed_flops(part.shape, part.segments) for rank, part in parts.items()}
    slowest = max(parts, key=lambda rank: 3 * forward[rank] + again[rank])
    part, forward_s, again_s = parts[slowest], forward[slowest] * token_s, again[slowest] * token_s
    num_microbatches = part.num_microbatches
    seconds = axis_seconds(job.model, part, axes, cluster, compute_s=num_microbatches * 3 * forward_s)
    layer_again = again[slowest] / max(1, part.num_layers)
    times = _stage_times(job.model, part, layers, layer_again=layer_again, flop_s=token_s)
    return Assessment(
        layout=layout,
        memory=fullest.on_device(cluster.device),
        layers_per_stage=layers,
        num_microbatches=num_microbatches,
        compute_s=num_microbatches * 3 * forward_s,
        recompute_s=num_microbatches * again_s,
        bubble_s=bubble_s(layout.parallel, times, num_microbatches),
        communication_s=seconds,
        model_flops=3 * job.batch_tokens * job.model.flops_per_token(job.seq_len / 2),
    )


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


ACTIVATIONS = (
    ActivationCheckpointingConfig(),
    ActivationCheckpointingConfig(mode="selective"),
    *(ActivationCheckpointingConfig(mode="full", layers_per_segment=layers) for layers in (1, 2, 4, 8)),
)
ZERO_STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)
MARGIN = 0.9
"""Share of the memory that a layout may fill: the model's own error, and what allocators lose between blocks."""
_MAX_MICROBATCH_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Layouts that fit, fastest first, one for each mesh and ZeRO stage; for each that does not fit, its least
    memory.
    """

    fitting: Sequence[Assessment]
    too_large: Sequence[Assessment]
    refused: Sequence[str] = field(default_factory=tuple)


def propose(job: TrainingJob, cluster: Cluster, *, memory_share: float = MARGIN) -> Proposal:
    """All layouts, assessed. Raises `ConfigError` if none divides the model, the batch and the devices."""
    room = memory_share * cluster.memory_bytes
    fitting: dict[tuple, Assessment] = {}
    smallest: dict[tuple, Assessment] = {}
    refused: dict[str, None] = {}
    for layout in layouts(job, cluster):
        try:
            found = assess(job, layout, cluster)
        except ConfigError as error:
            refused.setdefault(str(error))
            continue
        key = (*layout.axes.values(), layout.parallel.zero_stage)
        if found.memory.total <= room and (key not in fitting or _rank(found) < _rank(fitting[key])):
            fitting[key] = found
        if key not in smallest or found.memory.total < smallest[key].memory.total:
            smallest[key] = found
    if not smallest:
        why = "; ".join(refused) or (
            f"{job.num_rows} rows of a batch, {job.model.num_layers} layers and {job.model.num_heads} heads are too "
            "few or do not divide; take a larger batch or fewer devices"
        )
        raise ConfigError(f"hosts: no layout divides this job over {cluster.num_devices} devices: {why}")
    return Proposal(
        fitting=sorted(fitting.values(), key=_rank),
        too_large=sorted(
            (found for key, found in smallest.items() if key not in fitting), key=lambda found: found.memory.total
        ),
        refused=tuple(refused),
    )


def layouts(job: TrainingJob, cluster: Cluster) -> Iterator[Layout]:
    """Every layout that divides the devices, the rows and the layers evenly."""
    for parallel in meshes(job, cluster):
        axes = parallel.axes(cluster.num_devices)
        copies = axes["replicate"] * axes["shard"]
        if job.num_rows % copies:
            continue
        for rows in (2**k for k in range(min(_MAX_MICROBATCH_ROWS, job.num_rows // copies).bit_length())):
            num_microbatches = job.num_rows // copies // rows
            if job.num_rows % (copies * rows) or not _schedulable(job.model, parallel, num_microbatches):
                continue
            # Zero bubble splits backward in two and cannot compute again.
            for activations in ACTIVATIONS[:1] if parallel.schedule == "zero_bubble" else ACTIVATIONS:
                yield Layout(
                    parallel=parallel,
                    num_devices=cluster.num_devices,
                    microbatch_rows=rows,
                    activations=activations,
                )


def meshes(job: TrainingJob, cluster: Cluster) -> Iterator[ParallelConfig]:
    """Tensor parallelism stays within a host; context parallelism is tried for long rows only."""
    devices, model = cluster.num_devices, job.model
    contexts = [c for c in _divisors(devices) if c == 1 or job.seq_len // c >= 4096]
    for tensor, context in itertools.product(_divisors(cluster.devices_per_host), contexts):
        if model.num_heads % tensor or model.num_kv_heads % tensor or model.ffn_dim % tensor:
            continue
        for pipeline in _divisors(devices // (tensor * context) if devices % (tensor * context) == 0 else 0):
            if pipeline > model.num_layers:
                continue
            data = devices // (tensor * context * pipeline)
            for zero_stage, group_size in _shard_groups(cluster, data, context, tensor):
                for schedule, stages in _schedules(pipeline, model.num_layers):
                    yield ParallelConfig(
                        pipeline=pipeline,
                        data=data,
                        context=context,
                        tensor=tensor,
                        zero_stage=zero_stage,
                        shard_group_size=group_size,
                        schedule=schedule,
                        stages_per_rank=stages,
                    )


def _rank(found: Assessment) -> tuple[float, int]:
    """Sort key: faster first, of equally fast ones the smaller."""
    return found.step_s, found.memory.total


def _shard_groups(cluster: Cluster, data: int, context: int, tensor: int) -> Iterator[tuple[ZeroStage, int]]:
    yield 0, 0
    if data == 1:
        return
    in_host = cluster.devices_per_host // (context * tensor)
    for zero_stage in ZERO_STAGES[1:]:
        yield zero_stage, 0
        if 1 < in_host < data and data % in_host == 0:
            yield zero_stage, in_host


def _schedules(pipeline: int, num_layers: int) -> Iterator[tuple[Schedule, int]]:
    """GPipe is never faster than 1F1B and holds more, so it is not proposed."""
    yield "1f1b", 1
    if pipeline > 1:
        yield "zero_bubble", 1
        if 2 * pipeline <= num_layers:
            yield "zero_bubble", 2
        for stages_per_rank in (2, 4):
            if pipeline * stages_per_rank <= num_layers:
                yield "interleaved", stages_per_rank


def _schedulable(model: ModelConfig, parallel: ParallelConfig, num_microbatches: int) -> bool:
    """Whether training would accept this pipeline; with fewer microbatches than ranks it would mostly wait."""
    if num_microbatches < parallel.pipeline:
        return False
    divided = parallel.zero_stage != 0 or parallel.tensor > 1
    if model.tie_embeddings and divided and is_v_shaped(parallel):
        return False
    try:
        check_microbatches(parallel, num_microbatches)
    except ConfigError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
