"""What one step of a training needs: FLOPs, and bytes through memory, links and the disk. Nothing here is measured.

Counted as stated beside each field, without codecs, so that what compression would save stays visible.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from modelwright.model.adapters import adapter_parameters
from modelwright.model.config import ModelConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.pipeline.estimate.cost import training_memory
from modelwright.pipeline.estimate.layout import Layout, TrainingJob, expected_traffic, fullest_memory
from modelwright.train.config import TrainConfig
from modelwright.train.memory.activations import FP32_BYTES, block_shape, total_kept_bytes, total_recomputed_flops
from modelwright.train.memory.checkpointing import segments_for
from modelwright.train.memory.config import ActivationCheckpointingConfig

STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0, "adamw_bf16_states": 4.0, "lion": 4.0, "muon": 4.0, "sgd": 0.0}
"""Bytes of optimizer states per weight; Muon's for the blocks' matrices, without the scales of 8-bit states."""
SAVES_EVERYTHING = ActivationCheckpointingConfig()
NARROW_VOCABULARY = 2**16
"""Rows hold token ids in two bytes up to this vocabulary, in four above it (`data/rows/pack.py`)."""


@dataclass(frozen=True, kw_only=True)
class StepNeeds:
    """One step of a training over `num_processes` processes of this host, summed over them unless said otherwise."""

    num_processes: int
    axes: Mapping[str, int]
    """Ranks along each axis of the mesh."""
    flops: float
    """Forward, twice that for backward, and what activation checkpointing computes again."""
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
    """Reads of them: rows are shuffled, so each is at a place of its own."""
    checkpoint_bytes: float
    """One checkpoint: trained weights and optimizer states."""
    checkpoint_every_steps: int
    checkpoint_every_s: float
    """0 for none by time."""
    peak_bytes: float
    """Planned memory of all processes."""
    peak_without_checkpointing_bytes: float
    """The same if all activations were saved."""

    @property
    def memory_bytes(self) -> float:
        """Bytes through memory in a step."""
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
    """Count one step. seq_len: tokens of a row; fused: whether the package's own kernels run (`BlockShape`). Raises
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
    """Planned peak of the fullest process."""
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
