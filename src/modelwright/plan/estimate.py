"""What a stage will cost: parameters, FLOPs, memory by part and wall time, without running it.

Memory follows what the decoder's forward pass keeps for its backward pass, tensor by tensor; a test holds the total
against the measured peak of a real training step. Time is FLOPs over a measured rate times an assumed utilisation.
Knows no recipe: the caller says how many tokens each stage sees.

Legend of the comments: D model width, Q all query heads, K all key/value heads, F feed-forward width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from modelwright.model.config import ModelConfig
from modelwright.ops.cross_entropy import CHUNK_TOKENS

Compute = Literal["fp32", "bf16"]

ASSUMED_TRAIN_MFU = 0.60
"""Share of the products' measured rate that a training step reaches on a CPU; the rest is norms, attention, softmax,
the optimizer and Python. Prototypes of 7 M parameters reached 0.59-0.73 on two AVX2 cores."""

ASSUMED_FORWARD_MFU = 0.50
"""The same for scoring: packing is less even and the log-softmax weighs more without a backward pass."""

PROCESS_BYTES = 350 * 2**20
"""Resident memory of Python with torch imported and warmed up, before the model."""

_FP32 = 4
_ADAM_STATES = 2


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes by part at the peak of a training step, on one rank.

    `activations`: kept from forward to backward; `workspace`: the largest of what is needed for a moment (a chunk of
    logits, one block's backward pass); `checkpoint_copy`: the copy that an asynchronous checkpoint writes from.
    """

    process: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    checkpoint_copy: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """One line of a plan. 0 stands for "none" (FLOPs) or "small" (memory)."""

    name: str
    tokens: float
    flops: float
    seconds: float
    peak_bytes: int


def training_memory(
    model: ModelConfig,
    *,
    tokens_per_microbatch: int,
    compute: Compute,
    activation_checkpoint_every: int,
    head_chunk_tokens: int = CHUNK_TOKENS,
    async_checkpoints: bool = True,
) -> MemoryEstimate:
    """Memory of training with FP32 master weights and AdamW.

    `tokens_per_microbatch`: of one rank, padding included. `activation_checkpoint_every`: every n-th block keeps its
    input only, 0 none.
    """
    weights = model.num_parameters * _FP32
    kept = _kept_bytes(model, tokens_per_microbatch, compute, activation_checkpoint_every)
    head_phase = kept[-1] + _head_workspace_bytes(model, min(head_chunk_tokens, tokens_per_microbatch))
    peak = max(head_phase, _blocks_phase_bytes(model, tokens_per_microbatch, compute, activation_checkpoint_every))
    cast_weights = model.num_parameters * 2 if compute == "bf16" else 0
    return MemoryEstimate(
        process=PROCESS_BYTES,
        weights=weights,
        gradients=weights,
        optimizer=_ADAM_STATES * weights,
        activations=kept[-1] + cast_weights,
        workspace=peak - kept[-1],
        checkpoint_copy=(1 + _ADAM_STATES) * weights if async_checkpoints else 0,
    )


def forward_flops(model: ModelConfig, *, num_tokens: float, mean_context: float) -> float:
    """FLOPs of scoring or prefilling `num_tokens` tokens; see `ModelConfig.flops_per_token`."""
    return num_tokens * model.flops_per_token(mean_context)


def training_flops(model: ModelConfig, *, num_tokens: float, mean_context: float) -> float:
    """Model FLOPs of training on `num_tokens` tokens: forward and twice that for backward (PaLM, appendix B)."""
    return 3.0 * forward_flops(model, num_tokens=num_tokens, mean_context=mean_context)


def recomputed_flops(model: ModelConfig, *, num_tokens: float, mean_context: float, every: int) -> float:
    """FLOPs that activation checkpointing of every `every`-th block (0: none) adds; they take time but are no MFU."""
    if not every:
        return 0.0
    head = 2.0 * model.vocab_size * model.model_dim
    blocks = num_tokens * (model.flops_per_token(mean_context) - head)
    return blocks * -(-model.num_layers // every) / model.num_layers


def training_stage(
    name: str,
    model: ModelConfig,
    *,
    num_steps: int,
    batch_tokens: int,
    num_microbatches: int,
    mean_context: float,
    compute: Compute,
    activation_checkpoint_every: int,
    flops_per_s: float,
    mfu: float = ASSUMED_TRAIN_MFU,
    world_size: int = 1,
) -> StageEstimate:
    """A training stage. `flops_per_s`: measured rate of the model's products on one rank (`doctor.measure_rates`)."""
    num_tokens = float(num_steps * batch_tokens)
    flops = training_flops(model, num_tokens=num_tokens, mean_context=mean_context)
    again = recomputed_flops(model, num_tokens=num_tokens, mean_context=mean_context, every=activation_checkpoint_every)
    memory = training_memory(
        model,
        tokens_per_microbatch=batch_tokens // (num_microbatches * world_size),
        compute=compute,
        activation_checkpoint_every=activation_checkpoint_every,
    )
    return StageEstimate(
        name=name,
        tokens=num_tokens,
        flops=flops,
        seconds=(flops + again) / (flops_per_s * mfu * world_size),
        peak_bytes=memory.total,
    )


def scoring_stage(
    name: str,
    model: ModelConfig,
    *,
    num_tokens: float,
    context_overlap: float,
    batch_tokens: int,
    flops_per_s: float,
    mfu: float = ASSUMED_FORWARD_MFU,
) -> StageEstimate:
    """Evaluation of `num_tokens` tokens; an upper bound, as if all lay in documents longer than the context."""
    run = num_tokens / (1.0 - context_overlap)
    flops = forward_flops(model, num_tokens=run, mean_context=model.max_seq_len / 2)
    per_token = _block_workspace_bytes(model, "fp32") + _FP32 * 2 * model.model_dim
    head = _head_workspace_bytes(model, min(CHUNK_TOKENS, batch_tokens))
    peak = PROCESS_BYTES + model.num_parameters * _FP32 + head + per_token * batch_tokens
    return StageEstimate(
        name=name, tokens=num_tokens, flops=flops, seconds=flops / (flops_per_s * mfu), peak_bytes=peak
    )


def data_stage(name: str, *, num_bytes: float, bytes_per_s: float, peak_bytes: int = PROCESS_BYTES) -> StageEstimate:
    """A stage that moves text: its time is bytes over a rate that the caller knows or assumes."""
    return StageEstimate(name=name, tokens=0.0, flops=0.0, seconds=num_bytes / bytes_per_s, peak_bytes=peak_bytes)


def plan_text(model: ModelConfig, stages: Sequence[StageEstimate], memory: Mapping[str, MemoryEstimate]) -> str:
    """The plan as plain text: parameters, a line per stage, the memory by part of each stage in `memory`."""
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
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people: `45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _kept_bytes(model: ModelConfig, num_tokens: int, compute: Compute, every: int) -> list[int]:
    """Bytes kept for backward after 0, 1, ... blocks, and last after the final norm with its hidden states."""
    whole, input_only = _block_activation_bytes(model, compute), _FP32 * model.model_dim
    kept = [_FP32 * 2 * model.head_dim * num_tokens]  # rotary tables
    for layer in range(model.num_layers):
        kept.append(kept[-1] + num_tokens * (input_only if _is_wrapped(layer, every) else whole))
    return [*kept, kept[-1] + num_tokens * _FP32 * 2 * model.model_dim]


def _blocks_phase_bytes(model: ModelConfig, num_tokens: int, compute: Compute, every: int) -> int:
    """The peak while blocks run backward, last to first: what is still kept, what is computed again, workspace."""
    kept = _kept_bytes(model, num_tokens, compute, every)
    again, work = _block_activation_bytes(model, compute), _block_workspace_bytes(model, compute)
    return max(
        kept[layer + 1] + num_tokens * (work + (again if _is_wrapped(layer, every) else 0))
        for layer in range(model.num_layers)
    )


def _is_wrapped(layer: int, every: int) -> bool:
    """Whether `memory.checkpointing.checkpoint_blocks` wraps this block."""
    return every > 0 and layer % every == 0


def _block_activation_bytes(model: ModelConfig, compute: Compute) -> int:
    """Bytes per token that one block keeps for backward: what autograd saves in `model.decoder.Block`.

    Two norms: normalised input (FP32) and, as input of the products, output. Q/K-norm: normalised input. Attention:
    rotated q and k, v, output. Feed-forward: gate, up, silu(gate), their product. Under autocast each of the five
    products that read a norm's output keeps its own BF16 copy of it.
    """
    d, f = model.model_dim, model.ffn_dim
    q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    qk_norm = q + k if model.qk_norm else 0
    if compute == "fp32":
        return _FP32 * (4 * d + qk_norm + 2 * q + 2 * k + 4 * f)
    return _FP32 * (2 * d + qk_norm) + 2 * (5 * d + 2 * q + 2 * k + 4 * f)


def _block_workspace_bytes(model: ModelConfig, compute: Compute) -> int:
    """Bytes per token while one block runs backward: gradients of product, gate and up, and of two hidden states."""
    width = _FP32 if compute == "fp32" else 2
    return width * 3 * model.ffn_dim + _FP32 * 2 * model.model_dim


def _head_workspace_bytes(model: ModelConfig, chunk_tokens: int) -> int:
    """A chunk of logits with its softmax, and the head's gradient twice (as computed and as scaled)."""
    return _FP32 * model.vocab_size * (2 * chunk_tokens + 2 * model.model_dim)
