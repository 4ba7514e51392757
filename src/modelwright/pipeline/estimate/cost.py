"""Cost of a stage before it runs: parameters, FLOPs, wall time, and memory by part at the peak of a training step under
any layout.

Time is FLOPs over a measured rate, plus an assumed share for all other work. A step's peak memory is the maximum over a
few moments: the head after the last block, each segment's backward, the end of backward, the exchange of gradients. For
each, the parts are added up as PyTorch holds them on one rank: FSDP2's buffers (a flat message next to the copies made
of it, the next group prefetched, the last scattered message) follow `torch.distributed.fsdp._fully_shard`. Tests
compare totals with measured peaks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from modelwright.model.adapters import adapter_parameters, projection_sizes
from modelwright.model.decoder import ModelConfig
from modelwright.model.low_rank import CHUNK_ELEMENTS, AdapterConfig, BaseFormat
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.ops.quantize import RUN_LEN
from modelwright.parallel.mesh import ZeroStage
from modelwright.train.memory.activations import (
    FP32_BYTES,
    ActivationCheckpointingConfig,
    BlockShape,
    Compute,
    Segment,
    block_shape,
    head_workspace_bytes,
    total_kept_bytes,
    total_recomputed_flops,
)
from modelwright.train.memory.checkpointing import segments_for
from modelwright.train.work import adapter_step_flops

TRAINING_PROCESS_BYTES = 455 * 2**20
"""Resident memory of a process in a training stage without the tensors of the model: Python, PyTorch and the other
libraries that training loads, oneDNN's kernels, and tensors below `ops.tensor_heap.LEAST_BYTES`. Measured with PyTorch
2.13 on Linux: 373 MiB in a run of `tiny` with large microbatches, 455 at the end of the quickstart's pretraining on an
AMD EPYC, and 15 more with AMX. It holds because products have few shapes (`ops.matmul.padded_rows`)."""

PROCESS_BYTES = 400 * 2**20
"""The same in other stages, which load neither optimizers nor what they import: 378 MiB measured while rows are packed,
364 in the evaluation of the quickstart (`benchmarks/planned_peaks.py`)."""

HEAP_GAPS = 0.03
"""Gaps of the heap for tensors (`ops.tensor_heap`) as a share of the tensors in it at the peak: measured 0.01 in the
quickstart's pretraining, with an evaluation and text samples in between."""

ADAM_STATES = 2

PROJECTION_BYTES: Mapping[BaseFormat, float] = {
    "full": FP32_BYTES,
    "int8": 1 + FP32_BYTES / RUN_LEN,
    "nf4": 0.5 + FP32_BYTES / RUN_LEN,
}
"""Bytes of a weight of a frozen projection, its share of the scales included."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes by part at the peak of a training step, on one rank.

    weights, gradients, optimizer: this rank's share; gathered: whole weights that FSDP has gathered, with its messages;
    activations: saved from forward to backward; workspace: temporary memory (a chunk of logits, recomputation, one
    block's backward pass); transport: flat copies of gradients in flight; checkpoint_copy: source of an asynchronous
    checkpoint, in host memory; process: memory before the model exists; heap_gaps: see `resident`; further_models:
    models in addition to the one in training, with gradients and states if they are trained.
    """

    process: int = 0
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0
    workspace: int = 0
    transport: int = 0
    checkpoint_copy: int = 0
    heap_gaps: int = 0
    further_models: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer states, which ZeRO divides."""
        return self.weights + self.gradients + self.optimizer

    def on_device(self, device: str) -> "MemoryEstimate":
        """Returns the part that uses the device's memory: on a CPU everything in `resident`; on an accelerator without
        the process and checkpoint copies.
        """
        return self.resident() if device == "cpu" else replace(self, process=0, checkpoint_copy=0)

    def resident(self) -> "MemoryEstimate":
        """Returns the estimate with the gaps of the heap in training on a CPU."""
        tensors = self.total - self.process - self.heap_gaps
        return replace(self, heap_gaps=int(HEAP_GAPS * tensors))


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """The work of a rank in a training step.

    segments: treatment of activations in its blocks; shape: their widths on this rank; num_tokens: tokens of a
    microbatch on this rank; in_flight: microbatches whose activations it stores at once (fractional if a rank has
    several stages); tensor: ranks that share each matrix; zero_stage, sharing: sharded states, and the ranks over which
    they are sharded; copies: ranks whose gradients are summed; adapters: with them nothing else is trained.
    """

    segments: tuple[Segment, ...]
    shape: BlockShape
    num_tokens: int
    num_microbatches: int = 1
    in_flight: float = 1.0
    has_embedding: bool = True
    has_head: bool = True
    tensor: int = 1
    zero_stage: ZeroStage = 0
    sharing: int = 1
    copies: int = 1
    head_chunk_tokens: int = CHUNK_TOKENS
    async_checkpoints: bool = True
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    @property
    def num_layers(self) -> int:
        return sum(segment.num_layers for segment in self.segments)

    @property
    def pieces(self) -> int:
        """Number of shards that the states are divided into."""
        return 1 if self.zero_stage == 0 else self.sharing


def block_parameters(model: ModelConfig, tensor: int) -> int:
    """Parameters of one block on one rank: matrices are sharded, norms are not."""
    replicated = model.replicated_block_parameters
    return (model.block_parameters - replicated) // tensor + replicated


def root_parameters(model: ModelConfig, part: RankPart) -> int:
    """Parameters outside the blocks on one rank: embedding, final norm, head (a copy if it is tied to a remote
    embedding).
    """
    table = model.vocab_size * model.model_dim // part.tensor
    has_own_head = part.has_head and not (model.tie_embeddings and part.has_embedding)
    return table * (part.has_embedding + has_own_head) + model.model_dim * part.has_head


def block_bytes(model: ModelConfig, part: RankPart) -> int:
    """Bytes of one block's weights on one rank, adapters included."""
    whole = FP32_BYTES * block_parameters(model, part.tensor)
    if not part.adapters.r:
        return whole
    trained = FP32_BYTES * trained_of_block(model, part)
    matrices = sum(outputs * inputs for outputs, inputs in projection_sizes(model).values()) // model.num_layers
    saved = matrices * (FP32_BYTES - PROJECTION_BYTES[part.adapters.base_format]) / part.tensor
    return int(whole - saved) + trained


def trained_of_block(model: ModelConfig, part: RankPart) -> int:
    """Parameters of one block on one rank that are trained."""
    if not part.adapters.r:
        return block_parameters(model, part.tensor)
    return adapter_parameters(model, part.adapters) // (model.num_layers * part.tensor)


def rank_memory(model: ModelConfig, part: RankPart) -> MemoryEstimate:
    """Estimates the memory of training with FP32 master weights and AdamW."""
    weights = FP32_BYTES * root_parameters(model, part) + part.num_layers * block_bytes(model, part)
    trained = FP32_BYTES * _num_trained(model, part) // part.pieces
    states = MemoryEstimate(
        process=TRAINING_PROCESS_BYTES,
        weights=weights // part.pieces,
        optimizer=ADAM_STATES * trained,
        checkpoint_copy=(1 + ADAM_STATES) * trained if part.async_checkpoints else 0,
    )
    peak = max(_moments(model, part), key=lambda moment: moment.total)
    parts = {name: value for name, value in asdict(peak).items() if value}
    return replace(states, **parts)


def head_workspace(model: ModelConfig, part: RankPart) -> int:
    """Bytes of the head's workspace; 0 on a rank without one."""
    if not part.has_head:
        return 0
    return head_workspace_bytes(
        model, num_tokens=part.num_tokens, chunk_tokens=part.head_chunk_tokens, tensor=part.tensor
    )


def _moments(model: ModelConfig, part: RankPart) -> Iterator[MemoryEstimate]:
    """Yields the moments of a step that may be its peak, without the parts that are constant."""
    root, block = FP32_BYTES * root_parameters(model, part), block_bytes(model, part)
    # Gradients that earlier microbatches of the step have accumulated: whole in stage 1, else sharded.
    whole = 0 if part.num_microbatches == 1 else FP32_BYTES * _num_trained(model, part)
    earlier = whole if part.zero_stage == 1 else whole // part.pieces
    # Bytes that the blocks save for one microbatch; rotary tables and the gradient of the residual stream.
    kept_of_one = part.num_tokens * total_kept_bytes(part.shape, part.segments)
    tables = FP32_BYTES * part.num_tokens * 2 * model.head_dim

    # After all blocks the root's weights are gathered again, then the head computes. Outside the blocks, the final
    # norm's normalized input and output are alive, and the gradient that the head computes at once.
    gathered = _gathered_bytes(model, part, part.num_layers)
    gradients = earlier + sum(_fresh_gradients(model, part, part.num_layers))
    outside = tables + FP32_BYTES * part.num_tokens * 3 * model.model_dim * part.has_head
    here = MemoryEstimate(activations=int(part.in_flight * kept_of_one) + outside, gradients=gradients)
    if part.zero_stage != 0:
        yield replace(here, gathered=gathered + root)
    yield replace(here, gathered=gathered, workspace=head_workspace(model, part))

    # Each segment's backward, with the activations saved before it and the gradients of the layers after it.
    messages = 0 if part.zero_stage == 0 else 2 * block
    kept, layer = (part.in_flight - 1) * kept_of_one, 0
    for place, segment in enumerate(part.segments):
        layer += segment.num_layers
        kept += part.num_tokens * part.shape.kept_bytes(segment)
        if part.segments[place - 1 : place] == part.segments[place + 1 : place + 2] == (segment,):
            continue  # between equal segments everything rises or falls evenly: a peak is at an end
        fetched = segment.num_layers if part.zero_stage == 3 else 0
        # Products in 16 bits need casts of the weights: of all blocks that are recomputed together, else of a matrix.
        widest = 2 * model.model_dim * max(part.shape.ffn_dim, part.shape.query_dim)
        casts = segment.num_layers * block // 2 if segment.recompute else widest
        casts = 0 if part.shape.compute == "fp32" else casts
        if part.adapters.base_format != "full":
            casts += FP32_BYTES * min(CHUNK_ELEMENTS, widest // 2)
        whole, divided = _fresh_gradients(model, part, layer - 1)
        yield MemoryEstimate(
            activations=int(kept) + tables,
            workspace=part.num_tokens * part.shape.moment_bytes(segment) + casts,
            gathered=_gathered_bytes(model, part, layer) + fetched * block + messages,
            gradients=earlier + whole + divided,
        )

    # The embedding's gradient arrives, then replicas sum their gradients.
    table = FP32_BYTES * model.vocab_size * model.model_dim // part.tensor
    gradients = earlier + sum(_fresh_gradients(model, part, 0))
    others = int((part.in_flight - 1) * kept_of_one)
    # A new gradient of the table is added to an existing one: of an earlier microbatch, or of the tied head.
    added = (
        not part.adapters.r
        and part.has_embedding
        and (part.num_microbatches > 1 or (model.tie_embeddings and part.has_head))
    )
    yield MemoryEstimate(
        gradients=gradients,
        activations=others + tables,
        gathered=0 if part.zero_stage == 0 else 2 * root,
        workspace=table if added else 0,
    )
    states = FP32_BYTES * _num_trained(model, part) // part.pieces
    yield MemoryEstimate(gradients=states, transport=states if part.copies > 1 else 0)


def _fresh_gradients(model: ModelConfig, part: RankPart, first_layer: int) -> tuple[int, int]:
    """Gradients of this microbatch once blocks `first_layer` and later have run backward: (whole, sharded). The head's
    gradient exists from its own turn on.
    """
    layers = part.num_layers - first_layer
    blocks = FP32_BYTES * layers * trained_of_block(model, part)
    root = 0 if part.adapters.r else FP32_BYTES * root_parameters(model, part)
    head = FP32_BYTES * model.vocab_size * model.model_dim // part.tensor if part.has_head else 0
    outside = root if first_layer == 0 else min(head, root)
    if first_layer == part.num_layers:
        outside = 0
    if part.zero_stage == 0:
        return (0, 0) if part.num_microbatches > 1 else (blocks + outside, 0)
    if part.zero_stage == 1 and part.num_microbatches > 1:
        return outside, 0
    return outside, blocks // part.pieces if part.num_microbatches == 1 else 0


def _gathered_bytes(model: ModelConfig, part: RankPart, num_layers: int) -> int:
    """Whole weights that are held while the first `num_layers` blocks still have to run backward."""
    root = FP32_BYTES * root_parameters(model, part)
    if part.zero_stage == 0:
        return 0
    if part.zero_stage == 3:
        return root
    return root + num_layers * block_bytes(model, part)


def _num_trained(model: ModelConfig, part: RankPart) -> int:
    root = 0 if part.adapters.r else root_parameters(model, part)
    return root + part.num_layers * trained_of_block(model, part)


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
