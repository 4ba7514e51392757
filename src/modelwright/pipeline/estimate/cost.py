"""Cost of a stage before it runs: parameters, FLOPs, memory by part and wall time.

Memory is that of `estimate/memory.py` for one rank. Time is FLOPs over a measured rate, plus an assumed share for all
other work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from modelwright.model.adapter_config import AdapterConfig
from modelwright.model.config import ModelConfig
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.pipeline.estimate.memory import PROCESS_BYTES, MemoryEstimate, RankPart, rank_memory
from modelwright.train.flops import adapter_step_flops
from modelwright.train.memory.activations import FP32_BYTES, Compute, block_shape, total_recomputed_flops
from modelwright.train.memory.checkpointing import segments_for
from modelwright.train.memory.config import ActivationCheckpointingConfig

ASSUMED_TRAIN_MFU = 0.60
"""Share of the products' measured rate that a training step reaches on a CPU; the rest is norms, attention, softmax,
the optimizer and Python. Prototypes of 7 M parameters reached 0.59-0.73 on two AVX2 cores."""

ASSUMED_OTHER_WORK = 0.58
"""Time of a training step on a CPU outside its matrix products (norms, attention, softmax, the optimizer and Python),
as a multiple of the time of these products in FP32. It does not shrink with products in 16 bits, so a share of the
step's own products would be too little by the ratio of the two rates. The quickstart took 0.56 in pretraining, Muon's
products apart, and 0.58 in fine-tuning (FP32, one thread on AVX2, processor time of steps and of products in turn)."""

ASSUMED_FORWARD_MFU = 0.70
"""Share of the products' measured rate that scoring reaches: packing is less even than in training, and the log-softmax
weighs more without a backward pass. The quickstart's evaluation, of 8.6 million parameters then, reached 0.95 on two
AVX-512 cores."""

TRAINING_OVERHEAD_S = 12.0
"""Seconds of a training stage outside its steps and validations: the rate of products is measured before and after it,
4 s each, weights are loaded, text is sampled twice, and the artifact is written. The quickstart took 22 s on two cores
that others kept busy."""

WITHOUT_ADAPTERS = AdapterConfig()
"""All weights of the model are trained."""


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """A line of a plan. 0 stands for "none" (FLOPs) or "small" (memory)."""

    name: str
    tokens: float
    flops: float
    seconds: float
    peak_bytes: int
    further_bytes: int = 0
    """Part of the peak that is due to models in addition to the one in training. It is counted whole on each process,
    although a layout may divide those that are trained."""
    overhead_s: float = 0.0
    """Part of the seconds outside of training steps."""


def training_memory(
    model: ModelConfig,
    *,
    tokens_per_microbatch: int,
    num_microbatches: int = 1,
    compute: Compute,
    activations: ActivationCheckpointingConfig,
    head_chunk_tokens: int = CHUNK_TOKENS,
    async_checkpoints: bool = True,
    fused: bool = False,
    adapters: AdapterConfig = WITHOUT_ADAPTERS,
) -> MemoryEstimate:
    """Estimates memory of training on one rank with the whole model; `tokens_per_microbatch`: tokens with padding;
    fused: see `BlockShape`.
    """
    part = _whole_model(model, tokens_per_microbatch, compute, activations, fused=fused)
    part = replace(part, num_microbatches=num_microbatches, head_chunk_tokens=head_chunk_tokens)
    return rank_memory(model, replace(part, async_checkpoints=async_checkpoints, adapters=adapters))


def _whole_model(
    model: ModelConfig, num_tokens: int, compute: Compute, activations: ActivationCheckpointingConfig, *, fused: bool
) -> RankPart:
    shape = block_shape(model, compute=compute, mean_context=model.max_seq_len / 2, fused=fused)
    segments = segments_for(activations, model.num_layers, shape=shape, num_tokens=num_tokens)
    return RankPart(segments=tuple(segments), shape=shape, num_tokens=num_tokens)


def training_stage(
    name: str,
    model: ModelConfig,
    *,
    num_steps: int,
    batch_tokens: int,
    num_microbatches: int,
    mean_context: float,
    compute: Compute,
    activations: ActivationCheckpointingConfig,
    flops_per_s: float,
    fp32_flops_per_s: float,
    world_size: int = 1,
    fused: bool = False,
    adapters: AdapterConfig = WITHOUT_ADAPTERS,
    validation_tokens: float = 0.0,
    update_flops: float = 0.0,
) -> StageEstimate:
    """Estimates a training stage. `flops_per_s`: measured rate of the model's products on one rank
    (`doctor.measure_rates`); `fp32_flops_per_s`: the same in FP32; `validation_tokens`: tokens of all evaluations
    together; `update_flops`: products of the optimizer in one step.
    """
    num_tokens = float(num_steps * batch_tokens)
    # forward and twice that for backward (PaLM, appendix B)
    flops = 3.0 * num_tokens * model.flops_per_token(mean_context)
    flops += adapter_step_flops(model, adapters, num_tokens=num_tokens, num_targets=num_tokens)
    tokens_per_microbatch = batch_tokens // (num_microbatches * world_size)
    part = _whole_model(model, tokens_per_microbatch, compute, activations, fused=fused)
    # Recomputation costs time, but is not part of the model's FLOPs (utilization counts only these).
    again = num_tokens * total_recomputed_flops(replace(part.shape, mean_context=mean_context), part.segments)
    memory = rank_memory(model, replace(part, num_microbatches=num_microbatches, adapters=adapters))
    products_s = (flops + again + num_steps * update_flops) / (flops_per_s * world_size)
    steps_s = products_s + ASSUMED_OTHER_WORK * (flops + again) / (fp32_flops_per_s * world_size)
    validation_flops = validation_tokens * model.flops_per_token(mean_context)
    overhead_s = TRAINING_OVERHEAD_S + validation_flops / (flops_per_s * ASSUMED_FORWARD_MFU * world_size)
    return StageEstimate(
        name=name,
        tokens=num_tokens,
        flops=flops,
        seconds=steps_s + overhead_s,
        peak_bytes=memory.total,
        overhead_s=overhead_s,
    )


def scoring_stage(
    name: str,
    model: ModelConfig,
    *,
    num_tokens: float,
    num_context_tokens: float,
    batch_tokens: int,
    flops_per_s: float,
    mfu: float = ASSUMED_FORWARD_MFU,
) -> StageEstimate:
    """Estimates the scoring of `num_tokens` tokens, with further tokens that are computed again as their context."""
    run = num_tokens + num_context_tokens
    flops = run * model.flops_per_token(model.max_seq_len / 2)
    shape = block_shape(model, compute="fp32", mean_context=0)
    per_token = shape.workspace_bytes + FP32_BYTES * 2 * model.model_dim
    head = FP32_BYTES * model.vocab_size * 2 * min(CHUNK_TOKENS, batch_tokens)
    peak = PROCESS_BYTES + model.num_parameters * FP32_BYTES + head + per_token * batch_tokens
    return StageEstimate(
        name=name, tokens=num_tokens, flops=flops, seconds=flops / (flops_per_s * mfu), peak_bytes=peak
    )


def data_stage(name: str, *, num_bytes: float, bytes_per_s: float, peak_bytes: int = PROCESS_BYTES) -> StageEstimate:
    """Estimates a stage that moves text: its time is bytes over a rate that the caller knows or assumes."""
    return StageEstimate(name=name, tokens=0.0, flops=0.0, seconds=num_bytes / bytes_per_s, peak_bytes=peak_bytes)


def plan_text(model: ModelConfig, stages: Sequence[StageEstimate], memory: Mapping[str, MemoryEstimate]) -> str:
    """Returns the plan as plain text: parameters, a line per stage, the memory by part of each stage in `memory`."""
    lines = [
        f"parameters  {model.num_parameters:,} (blocks {model.num_layers} x {model.block_parameters:,}, "
        f"embedding {model.embedding_parameters:,})",
        "",
        f"{'stage':<14}{'tokens':>12}{'FLOPs':>11}{'time':>10}{'peak memory':>14}",
    ]
    for stage in stages:
        tokens = f"{stage.tokens:,.0f}" if stage.tokens else "-"
        flops = f"{stage.flops:.2e}" if stage.flops else "-"
        lines.append(
            f"{stage.name:<14}{tokens:>12}{flops:>11}{duration(stage.seconds):>10}{size(stage.peak_bytes):>14}"
        )
    lines.append(f"{'total':<14}{'':>23}{duration(sum(stage.seconds for stage in stages)):>10}")
    for name, estimate in memory.items():
        parts = ", ".join(f"{part} {size(value)}" for part, value in asdict(estimate).items() if value)
        lines += ["", f"memory of {name}: {size(estimate.total)} = {parts}"]
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Formats bytes in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Formats seconds: `45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
