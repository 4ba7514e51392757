"""Proposes layouts of a training job over a cluster: all that fit, fastest first, and why the others do not.

Tries every way to divide the devices among the axes, ZeRO stages over all copies or within hosts, schedules, sizes of
microbatches and ways to treat activations.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from modelwright.core.errors import ConfigError
from modelwright.model.config import ModelConfig
from modelwright.parallel.config import ParallelConfig, Schedule, ZeroStage
from modelwright.parallel.pipeline.stages import check_microbatches, is_v_shaped
from modelwright.pipeline.estimate.layout import Layout, TrainingJob
from modelwright.train.memory.config import ActivationCheckpointingConfig
from modelwright_plan.assessment import Assessment, assess
from modelwright_plan.cluster import Cluster

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
