"""How long this machine takes for what a step needs, resource by resource, and which of them limits the training.

Each time is that of the resource if it had nothing else to do and the others cost nothing. They overlap in a real step,
which takes at least the longest of them and at most their sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from modelwright.pipeline.estimate.cost import ASSUMED_TRAIN_MFU
from modelwright.pipeline.estimate.probes.disk import BLOCK_BYTES
from modelwright.pipeline.estimate.probes.survey import MachineProbes
from modelwright_plan.advice.needs import StepNeeds

Resource = Literal["compute", "communication", "memory", "disk"]
RESOURCES: tuple[Resource, ...] = ("compute", "communication", "memory", "disk")
Transport = Literal["none", "shared memory", "gloo", "NCCL"]
"""What gradients travel through: nothing in a single process."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step by resource; one that was not measured is left out."""

    seconds: Mapping[Resource, float]
    checkpoint_s: float
    """Seconds until one checkpoint is on disk; 0 where the disk was not measured."""
    row_s: float
    """Seconds in which the rows of a step are read, each at its own place; 0 where reads were not measured."""
    latency_s: float
    """The part of the communication that messages wait for each other, whatever their size."""
    tcp_s: float
    """Seconds that the same messages would take over bare TCP; 0 where they do not go over it or loopback was not
    measured."""
    transport: Transport

    @property
    def bottleneck(self) -> Resource:
        return max(self.seconds, key=self.seconds.__getitem__)

    def share(self, resource: Resource) -> float:
        """The share of all resources' times, 0 for one that was not measured."""
        return self.seconds.get(resource, 0.0) / sum(self.seconds.values())

    @property
    def ratio(self) -> str:
        """All resources against compute."""
        unit = self.seconds["compute"]
        figures = [f"{self.seconds[one] / unit:.3g}" if one in self.seconds else "?" for one in RESOURCES]
        return f"{' : '.join(RESOURCES)} = {' : '.join(figures)}"


def step_times(
    needs: StepNeeds, probed: MachineProbes, *, flops_per_s: float, transport: Transport, num_devices: int = 1
) -> StepTimes:
    """Divide the needs by what was measured.

    flops_per_s: of the model's products on one device; num_devices: that share the work, 1 for a host whose processes
    share its cores
    """
    on_device = probed.figure("accelerator", "memory_bytes_per_s")
    memory_rate = num_devices * (on_device or probed.figure("memory", "all_threads_bytes_per_s"))
    seconds: dict[Resource, float] = {"compute": needs.flops / (flops_per_s * num_devices * ASSUMED_TRAIN_MFU)}
    latency_s = tcp_s = 0.0
    if transport == "gloo" and (tcp_rate := probed.figure("loopback", "bytes_per_s")):
        tcp_s = needs.link_bytes / tcp_rate + needs.link_messages * probed.figure("loopback", "latency_s")
    if transport == "none":
        seconds["communication"] = 0.0
    elif transport == "shared memory" and memory_rate:  # one writes what another reads
        seconds["communication"] = 2 * needs.num_processes * needs.link_bytes / memory_rate
    elif transport != "shared memory":
        kind, prefix = ("gloo", "") if transport == "gloo" else ("accelerator", "nccl_")
        if rate := probed.figure(kind, f"{prefix}bytes_per_s"):
            # The probe's all-reduce sends as many bytes per rank as its tensor has, in two messages.
            latency_s = needs.link_messages * probed.figure(kind, f"{prefix}latency_s") / 2
            seconds["communication"] = needs.link_bytes / rate + latency_s
        elif tcp_s:  # gloo, which itself was not measured: at least the time of its connections
            latency_s = needs.link_messages * probed.figure("loopback", "latency_s")
            seconds["communication"] = tcp_s
    if memory_rate:
        seconds["memory"] = needs.memory_bytes / memory_rate
    write, row_s = probed.figure("disk", "write_bytes_per_s"), _row_seconds(needs, probed)
    saving_s = needs.checkpoint_bytes / write + probed.figure("disk", "fsync_p50_s") if write else 0.0
    if write:
        seconds["disk"] = saving_s * _checkpoints_per_step(needs, max(seconds.values())) + row_s
    ordered: dict[Resource, float] = {one: seconds[one] for one in RESOURCES if one in seconds}
    return StepTimes(
        seconds=ordered,
        checkpoint_s=saving_s,
        row_s=row_s,
        latency_s=latency_s,
        tcp_s=tcp_s,
        transport=transport,
    )


def _row_seconds(needs: StepNeeds, probed: MachineProbes) -> float:
    """Each row takes one random read; what it has beyond the block of the probe follows in sequence."""
    reads, rate = probed.figure("disk", "reads_per_s"), probed.figure("disk", "read_bytes_per_s")
    if not reads or not rate:
        return 0.0
    return needs.row_reads / reads + max(0.0, needs.row_bytes - BLOCK_BYTES * needs.row_reads) / rate


def _checkpoints_per_step(needs: StepNeeds, step_s: float) -> float:
    """By steps and by time together, in a step of `step_s` seconds."""
    by_steps = 1 / needs.checkpoint_every_steps if needs.checkpoint_every_steps else 0.0
    by_time = step_s / needs.checkpoint_every_s if needs.checkpoint_every_s else 0.0
    return by_steps + by_time
