"""How long a step of one layout of a training job takes on a cluster, part by part.

Time is compute at the share of the peak rate that published runs reach, plus the pipeline's bubble, plus communication
that is not overlapped. Estimates rank layouts; they do not replace a measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from modelwright.model.config import ModelConfig
from modelwright.pipeline.estimate.layout import Layout, TrainingJob, layers_per_stage, rank_parts
from modelwright.pipeline.estimate.memory import MemoryEstimate, RankPart, rank_memory
from modelwright.train.memory.activations import total_recomputed_flops
from modelwright_plan.bubble import StageTime, bubble_s, bubble_share
from modelwright_plan.cluster import Cluster, axis_seconds


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
