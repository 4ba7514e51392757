"""Layouts of a training job over a cluster: all that fit, fastest first, and the reasons why the others do not.

Tries every way to divide the devices among the axes, ZeRO stages over all copies or within hosts, schedules, microbatch
sizes and modes of activation checkpointing. The time of a step is that of its operators (`step_time`), plus the
optimizer, the pipeline's bubble, and communication that is not overlapped. An axis whose ranks are in one host uses the
host's link, any other the network: that of all its ranks in the host together, as a ring enters a host once.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from modelwright.core.config import ConfigError
from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import ParallelConfig, Schedule, ZeroStage
from modelwright.parallel.pipeline.stages import check_microbatches, is_v_shaped
from modelwright.pipeline.estimate.cost import MemoryEstimate, RankPart, rank_memory
from modelwright.pipeline.estimate.layout import Layout, TrainingJob, layers_per_stage, rank_parts, sent_along
from modelwright.train.memory.activations import ActivationCheckpointingConfig
from modelwright_plan.bubble import StageTime, bubble_s, bubble_share
from modelwright_plan.step_time import OPTIMIZER_PASSES, ComputeRate, block_time, head_time, recomputed_s

OVERLAP = {"cuda": 0.8, "cpu": 0.0}
"""Share of compute under which FSDP's messages can hide: none over gloo, whose collectives wait for each other."""
LINK_SHARE = {"cuda": 0.8, "cpu": 1.0}
"""Share of a link's rate that collectives reach: large all-reduces of NCCL on 8 A100 or H100 reach 230 to 370 GB/s of
300 and 450 (nccl-tests); gloo's rates are measured ones."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices and links of a layout: memory and compute rate of one device, bytes/s of one device's link in each
    direction, and the time until a message's first byte arrives.
    """

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


def axis_seconds(
    model: ModelConfig, part: RankPart, axes: Mapping[str, int], cluster: Cluster, *, compute_s: float
) -> dict[str, float]:
    """Computes the seconds of a step for which a rank waits for each axis; leaves out axes of one rank."""
    reach, result = 1, {}  # reach: number of neighboring ranks from the axis's first to its last rank
    for axis in ("tensor", "context", "shard", "replicate", "pipeline"):
        stride, reach = reach, reach * axes[axis]
        if axes[axis] > 1:
            num_bytes, num_messages = sent_along(axis, model, part, axes)
            rate, latency_s = cluster.host_bytes_per_s, cluster.host_latency_s
            if reach > cluster.devices_per_host:
                # A ring through n ranks of a host can use the network links of all n; stages send to one peer each.
                num_links = 1 if axis == "pipeline" else max(1, cluster.devices_per_host // stride)
                rate = min(rate, num_links * cluster.network_bytes_per_s)
                latency_s = latency_s + (cluster.network_latency_s - latency_s) / num_links
            seconds = num_bytes / (rate * LINK_SHARE[cluster.device]) + num_messages * latency_s
            if axis == "shard":
                seconds = max(0.0, seconds - OVERLAP[cluster.device] * compute_s)
            result[axis] = seconds
    return result


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The memory of a layout's fullest rank and its step time by part, in seconds; communication excludes the part that
    overlaps with compute.
    """

    layout: Layout
    memory: MemoryEstimate
    layers_per_stage: tuple[int, ...]
    num_microbatches: int
    compute_s: float
    recompute_s: float
    optimizer_s: float
    bubble_s: float
    communication_s: Mapping[str, float]
    model_flops: float

    @property
    def step_s(self) -> float:
        work_s = self.compute_s + self.recompute_s + self.optimizer_s
        return work_s + self.bubble_s + sum(self.communication_s.values())

    @property
    def bubble_share(self) -> float:
        return bubble_share(bubble=self.bubble_s, work=self.compute_s + self.recompute_s)

    def utilization(self, cluster: Cluster) -> float:
        """Returns model FLOPs as a share of the devices' peak."""
        return self.model_flops / (self.step_s * self.layout.num_devices * cluster.compute.peak_flops_per_s)


def assess(job: TrainingJob, layout: Layout, cluster: Cluster) -> Assessment:
    """Computes a layout's memory and time. Raises `ConfigError` if it does not divide the model or the batch."""
    model, axes = job.model, layout.axes
    layers, parts = layers_per_stage(job, layout), rank_parts(job, layout)
    fullest = max((rank_memory(model, part) for part in parts.values()), key=lambda memory: memory.total)
    tokens = layout.microbatch_rows * job.seq_len // axes["context"]
    rate = cluster.compute
    # Seconds of one microbatch on each rank, and of its recomputation. All ranks have blocks of one shape.
    shape = next(iter(parts.values())).shape
    block = block_time(shape, tokens, rate)
    head = head_time(model.model_dim, model.vocab_size // axes["tensor"], tokens, rate, width=shape.width)
    work = {rank: part.num_layers * block.total_s + head.total_s * part.has_head for rank, part in parts.items()}
    again = {rank: recomputed_s(shape, part.segments, tokens, rate) for rank, part in parts.items()}
    slowest = max(parts, key=lambda rank: work[rank] + again[rank])
    part, num_microbatches = parts[slowest], parts[slowest].num_microbatches
    seconds = axis_seconds(model, part, axes, cluster, compute_s=num_microbatches * work[slowest])
    # Other stages wait for tensor parallelism's sums, too: half of them are in the forward pass.
    block_sums_s = seconds.get("tensor", 0.0) / (num_microbatches * max(1, part.num_layers))
    layer_again = again[slowest] / max(1, part.num_layers)
    times = [
        StageTime(
            forward_s=num_layers * (block.forward_s + block_sums_s / 2) + head.forward_s * is_last,
            input_s=num_layers * (block.input_s + layer_again + block_sums_s / 2) + head.input_s * is_last,
            weight_s=num_layers * block.weight_s + head.weight_s * is_last,
        )
        for num_layers, is_last in zip(layers, [False] * (len(layers) - 1) + [True], strict=True)
    ]
    return Assessment(
        layout=layout,
        memory=fullest.on_device(cluster.device),
        layers_per_stage=layers,
        num_microbatches=num_microbatches,
        compute_s=num_microbatches * work[slowest],
        recompute_s=num_microbatches * again[slowest],
        optimizer_s=OPTIMIZER_PASSES * fullest.states * rate.memory_s_per_byte,
        bubble_s=bubble_s(layout.parallel, times, num_microbatches),
        communication_s=seconds,
        model_flops=3 * job.batch_tokens * model.flops_per_token(job.seq_len / 2),
    )


ACTIVATIONS = (
    ActivationCheckpointingConfig(),
    ActivationCheckpointingConfig(mode="selective"),
    *(ActivationCheckpointingConfig(mode="full", layers_per_segment=layers) for layers in (1, 2, 4, 8)),
)
ZERO_STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)
MARGIN = 0.9
"""Share of the memory that a layout may fill; the rest covers errors of the estimate and fragmentation."""
_MAX_MICROBATCH_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Layouts that fit, the fastest first, one for each mesh and ZeRO stage; for each mesh and stage that does not fit,
    the layout with the least memory.
    """

    fitting: Sequence[Assessment]
    too_large: Sequence[Assessment]
    refused: Sequence[str] = field(default_factory=tuple)


def propose(job: TrainingJob, cluster: Cluster, *, memory_share: float = MARGIN) -> Proposal:
    """Assesses all layouts. Raises `ConfigError` if none divides the model, the batch and the devices."""
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
    """Yields every layout that divides the devices, the rows and the layers evenly."""
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
    """Yields the meshes to try. Tensor parallelism stays within a host; context parallelism is for long rows only."""
    devices, model = cluster.num_devices, job.model
    contexts = [c for c in _divisors(devices) if c == 1 or job.seq_len // c >= 4096]
    for tensor, context in itertools.product(_divisors(cluster.devices_per_host), contexts):
        if model.num_heads % tensor or model.num_kv_heads % tensor or model.ffn_dim % tensor:
            continue
        for pipeline in _divisors(devices // (tensor * context) if devices % (tensor * context) == 0 else 0):
            if pipeline > model.num_layers:
                continue
            data = devices // (tensor * context * pipeline)
            # ZeRO stages with the size of their groups: all copies (0), or those within a host.
            shardings: list[tuple[ZeroStage, int]] = [(0, 0)]
            in_host = cluster.devices_per_host // (context * tensor)
            for stage in ZERO_STAGES[1:] if data > 1 else ():
                shardings.append((stage, 0))
                if 1 < in_host < data and data % in_host == 0:
                    shardings.append((stage, in_host))
            for zero_stage, group_size in shardings:
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
    """Returns the sort key: faster layouts first, among equally fast ones the smaller."""
    return found.step_s, found.memory.total


def _schedules(pipeline: int, num_layers: int) -> Iterator[tuple[Schedule, int]]:
    """Yields schedules with their stages per rank, without GPipe: it is never faster than 1F1B and holds more."""
    yield "1f1b", 1
    if pipeline > 1:
        yield "zero_bubble", 1
        if 2 * pipeline <= num_layers:
            yield "zero_bubble", 2
        for stages_per_rank in (2, 4):
            if pipeline * stages_per_rank <= num_layers:
                yield "interleaved", stages_per_rank


def _schedulable(model: ModelConfig, parallel: ParallelConfig, num_microbatches: int) -> bool:
    """Returns True if training would accept this pipeline. With fewer microbatches than ranks it would mostly wait."""
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
