"""Bytes and seconds on the links, axis by axis of the mesh.

Ring algorithms: an all-gather or reduce-scatter of S bytes over n ranks sends (n - 1) / n * S from each, an all-reduce
twice that. An axis whose ranks lie in one host uses the host's link, any other the network. Traffic follows the model
passes: FSDP2 as `parallel.zero_stage` sets it up, FP32 weights and gradients; tensor parallelism as Shoeybi et al. 2019
and, with sequence parallelism, Korthikanti et al. 2022 (equal bytes).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from modelwright.core.errors import ConfigError
from modelwright.memory.activations import FP32_BYTES
from modelwright.model.config import ModelConfig
from modelwright.parallel.topology.rank_mapping import AxisTraffic
from modelwright.plan.catalog import ComputeRate
from modelwright.plan.memory import RankPart, block_parameters, root_parameters

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
            num_bytes, num_messages = _axis_traffic(axis, model, part, axes)
            seconds = cluster.seconds(num_bytes, num_messages, reach=reach)
            if axis == "shard":
                seconds = max(0.0, seconds - OVERLAP[cluster.device] * compute_s)
            result[axis] = seconds
    return result


def axis_traffic(model: ModelConfig, part: RankPart, axes: Mapping[str, int]) -> dict[str, AxisTraffic]:
    """Traffic on each hop of every axis of more than one rank in a step."""
    result = {}
    for axis, size in axes.items():
        if size > 1:
            num_bytes, num_messages = _axis_traffic(axis, model, part, axes)
            result[axis] = AxisTraffic(num_messages=num_messages, num_bytes=num_bytes / num_messages)
    return result


def _axis_traffic(axis: str, model: ModelConfig, part: RankPart, axes: Mapping[str, int]) -> tuple[float, float]:
    """Bytes that one rank sends in a step, and sequential messages."""
    ranks, rounds = axes[axis], part.num_microbatches
    share = (ranks - 1) / ranks
    weights = FP32_BYTES * (root_parameters(model, part) + part.num_layers * block_parameters(model, part.tensor))
    stream = part.num_tokens * model.model_dim * part.shape.width
    if axis == "tensor":
        # Two sums in a block's forward pass, two in its backward, and again what is computed again.
        again = sum(segment.num_layers for segment in part.segments if segment.recompute)
        sums = 4 * part.num_layers + 2 * again
        return rounds * sums * 2 * share * stream, rounds * sums * 2 * (ranks - 1)
    if axis == "context":
        pairs = part.num_tokens * 2 * part.shape.kv_dim * part.shape.width
        return rounds * part.num_layers * 3 * (ranks - 1) * pairs, rounds * part.num_layers * 3 * (ranks - 1)
    if axis == "shard":
        return _shard_traffic(part, weights, share, ranks)
    if axis == "replicate":
        return 2 * share * weights / part.pieces, 2 * (ranks - 1)
    return rounds * 2 * stream / part.tensor, rounds * 2


def _shard_traffic(part: RankPart, weights: float, share: float, ranks: int) -> tuple[float, float]:
    """Stage 3 gathers weights forward and backward and scatters gradients, for every microbatch; stage 2 gathers them
    once for every microbatch; stage 1 scatters gradients once per step.
    """
    fetches = part.num_microbatches * (2 if part.zero_stage == 3 else 1)
    scatters = 1 if part.zero_stage == 1 else part.num_microbatches
    messages = (fetches + scatters) * (part.num_layers + 1) * (ranks - 1)
    return (fetches + scatters) * share * weights, messages
