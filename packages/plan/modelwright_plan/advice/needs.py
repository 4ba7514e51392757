"""FLOPs and bytes of one training step, and the time that this machine takes for them, resource by resource.

Needs are counted as stated under each field, not measured, and without codecs, so that the gain from compression stays
visible. Each time is that of a resource if it did nothing else and the others cost nothing. They overlap in a real
step, which takes at least the longest of them and at most their sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from modelwright.model.adapters import adapter_parameters
from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.pipeline.estimate.cost import ASSUMED_TRAIN_MFU, training_memory
from modelwright.pipeline.estimate.layout import Layout, TrainingJob, expected_traffic, fullest_memory
from modelwright.pipeline.estimate.probes.disk import BLOCK_BYTES
from modelwright.pipeline.estimate.probes.survey import MachineProbes
from modelwright.train.config import TrainConfig
from modelwright.train.memory.activations import (
    FP32_BYTES,
    ActivationCheckpointingConfig,
    block_shape,
    total_kept_bytes,
    total_recomputed_flops,
)
from modelwright.train.memory.checkpointing import segments_for

STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0, "adamw_bf16_states": 4.0, "lion": 4.0, "muon": 4.0, "sgd": 0.0}
"""Bytes of optimizer states per weight; Muon's for the blocks' matrices, without the scales of 8-bit states."""
SAVES_EVERYTHING = ActivationCheckpointingConfig()
NARROW_VOCABULARY = 2**16
"""Rows hold token ids in two bytes up to this vocabulary, in four above it (`data/rows/pack.py`)."""


@dataclass(frozen=True, kw_only=True)
class StepNeeds:
    """Needs of one training step, summed over `num_processes` processes of this host unless a field says otherwise."""

    num_processes: int
    axes: Mapping[str, int]
    """Ranks along each axis of the mesh."""
    flops: float
    """FLOPs of forward, backward (twice as many) and recomputation by activation checkpointing."""
    weight_bytes: float
    """Weights read by the forward and the backward pass of each microbatch, and gradients added up."""
    activation_bytes: float
    """Saved activations, written and read once."""
    optimizer_bytes: float
    """Weights and states read and written, gradients read."""
    link_bytes: float
    """Bytes that one rank sends, over all axes, as exact FP32 sums."""
    link_messages: float
    """Messages that one rank sends one after the other."""
    row_bytes: float
    """Token ids read from the packed rows."""
    row_reads: float
    """Number of reads for these rows; each row is one read, because rows are shuffled."""
    checkpoint_bytes: float
    """Bytes of a checkpoint: trained weights and optimizer states."""
    checkpoint_every_steps: int
    checkpoint_every_s: float
    """Seconds between checkpoints by time; 0 means none."""
    peak_bytes: float
    """Planned memory of all processes."""
    peak_without_checkpointing_bytes: float
    """Planned memory of all processes if all activations were saved."""

    @property
    def memory_bytes(self) -> float:
        """Bytes that a step moves through memory."""
        return self.weight_bytes + self.activation_bytes + self.optimizer_bytes


def step_needs(
    model: ModelConfig,
    training: TrainConfig,
    parallel: ParallelConfig,
    *,
    num_processes: int,
    seq_len: int,
    fused: bool,
) -> StepNeeds:
    """Counts the needs of a step. seq_len: tokens of a row; fused: True if the package's own kernels run
    (`BlockShape`). Raises
    `ConfigError` if the layout does not divide the processes, the model or the batch.
    """
    axes = parallel.axes(num_processes)
    copies = training.num_copies(axes)
    num_rows = training.batch_rows(seq_len, num_copies=copies)
    num_microbatches = training.gradient_accumulation_steps
    compute = training.precision.planned_as
    shape = block_shape(model, compute=compute, mean_context=seq_len / 4, fused=fused)  # as in estimates of stages
    microbatch_tokens = training.batch_tokens // (num_microbatches * copies)
    segments = segments_for(
        training.activation_checkpointing, model.num_layers, shape=shape, num_tokens=microbatch_tokens
    )
    forward = model.flops_per_token(seq_len / 4)
    divided = axes["tensor"] * axes["pipeline"]
    # Each of the copies holds the weights; a model that is divided holds them once over its parts.
    held = FP32_BYTES * model.num_parameters * num_processes / divided
    trained = adapter_parameters(model, training.lora) or model.num_parameters
    updated = trained * num_processes / (divided * axes["shard"])
    states = STATE_BYTES[training.optimizer]
    layout = Layout(
        parallel=parallel,
        num_devices=num_processes,
        microbatch_rows=num_rows // (copies * num_microbatches),
        activations=training.activation_checkpointing,
    )
    job = TrainingJob(
        model=model,
        seq_len=seq_len,
        batch_tokens=training.batch_tokens,
        compute="fp32" if compute == "fp32" else "bf16",
    )
    traffic = expected_traffic(job, layout).values()
    return StepNeeds(
        num_processes=num_processes,
        axes=axes,
        flops=training.batch_tokens * (3 * forward + total_recomputed_flops(shape, segments)),
        weight_bytes=num_microbatches * held * 4,  # read forward and backward; gradients read and written
        activation_bytes=2.0 * training.batch_tokens * total_kept_bytes(shape, segments),
        optimizer_bytes=updated * (3 * FP32_BYTES + 2 * states),
        link_bytes=sum(one.num_messages * one.num_bytes for one in traffic),
        link_messages=sum(one.num_messages for one in traffic),
        row_bytes=training.batch_tokens * (2.0 if model.vocab_size <= NARROW_VOCABULARY else 4.0),
        row_reads=float(num_rows),
        checkpoint_bytes=trained * (FP32_BYTES + states),
        checkpoint_every_steps=training.checkpoint_every_steps,
        checkpoint_every_s=60 * training.checkpoint_every_minutes,
        peak_bytes=num_processes * _peak_bytes(training, job, layout, microbatch_tokens, fused=fused),
        peak_without_checkpointing_bytes=num_processes
        * _peak_bytes(
            replace(training, activation_checkpointing=SAVES_EVERYTHING),
            job,
            replace(layout, activations=SAVES_EVERYTHING),
            microbatch_tokens,
            fused=fused,
        ),
    )


def _peak_bytes(
    training: TrainConfig, job: TrainingJob, layout: Layout, microbatch_tokens: int, *, fused: bool
) -> float:
    """Returns the planned peak of the fullest process."""
    if layout.axes["replicate"] < layout.num_devices:  # the model is divided
        return fullest_memory(job, layout).total
    return training_memory(
        job.model,
        tokens_per_microbatch=microbatch_tokens,
        num_microbatches=training.gradient_accumulation_steps,
        compute=training.precision.planned_as,
        activations=training.activation_checkpointing,
        fused=fused,
        adapters=training.lora,
    ).total


Resource = Literal["compute", "communication", "memory", "disk"]
RESOURCES: tuple[Resource, ...] = ("compute", "communication", "memory", "disk")
Transport = Literal["none", "shared memory", "gloo", "NCCL"]
"""Channel for gradients; "none" for a single process."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of a step, in seconds."""

    seconds: Mapping[Resource, float]
    """Seconds by resource, without those that were not measured."""
    checkpoint_s: float
    """Seconds to write a checkpoint to disk; 0 if the disk was not measured."""
    row_s: float
    """Seconds to read the rows of a step, one random read for each; 0 if reads were not measured."""
    latency_s: float
    """Part of the communication time that is latency, independent of the size of messages."""
    tcp_s: float
    """Seconds for the same messages over bare TCP; 0 if another transport carries them or loopback was not measured."""
    transport: Transport

    @property
    def bottleneck(self) -> Resource:
        return max(self.seconds, key=self.seconds.__getitem__)

    def share(self, resource: Resource) -> float:
        """Returns a resource's share of the sum of all times; 0 if it was not measured."""
        return self.seconds.get(resource, 0.0) / sum(self.seconds.values())

    @property
    def ratio(self) -> str:
        """Times of all resources relative to compute, as text."""
        unit = self.seconds["compute"]
        figures = [f"{self.seconds[one] / unit:.3g}" if one in self.seconds else "?" for one in RESOURCES]
        return f"{' : '.join(RESOURCES)} = {' : '.join(figures)}"


def step_times(
    needs: StepNeeds, probed: MachineProbes, *, flops_per_s: float, transport: Transport, num_devices: int = 1
) -> StepTimes:
    """Divides the needs by the measured rates.

    flops_per_s: rate of the model's products on one device; num_devices: number of devices that share the work, 1 for a
    host whose processes share its cores
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
    write, row_s, saving_s = probed.figure("disk", "write_bytes_per_s"), 0.0, 0.0
    reads_per_s, read_rate = probed.figure("disk", "reads_per_s"), probed.figure("disk", "read_bytes_per_s")
    if reads_per_s and read_rate:
        # Each row takes one random read of a block; the rest of the row follows sequentially.
        row_s = needs.row_reads / reads_per_s
        row_s += max(0.0, needs.row_bytes - BLOCK_BYTES * needs.row_reads) / read_rate
    if write:
        saving_s = needs.checkpoint_bytes / write + probed.figure("disk", "fsync_p50_s")
        checkpoints = 1 / needs.checkpoint_every_steps if needs.checkpoint_every_steps else 0.0
        if needs.checkpoint_every_s:  # in addition to those by steps
            checkpoints += max(seconds.values()) / needs.checkpoint_every_s
        seconds["disk"] = saving_s * checkpoints + row_s
    ordered: dict[Resource, float] = {one: seconds[one] for one in RESOURCES if one in seconds}
    return StepTimes(
        seconds=ordered,
        checkpoint_s=saving_s,
        row_s=row_s,
        latency_s=latency_s,
        tcp_s=tcp_s,
        transport=transport,
    )
