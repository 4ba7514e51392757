"""The devices and links that a layout is planned for, and the seconds that its messages take on them.

An axis whose ranks lie in one host uses the host's link, any other the network.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from modelwright.core.errors import ConfigError
from modelwright.model.config import ModelConfig
from modelwright.pipeline.estimate.layout import sent_along
from modelwright.pipeline.estimate.memory import RankPart
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
