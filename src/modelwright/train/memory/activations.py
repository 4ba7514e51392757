"""Activations between forward and backward: what is saved, recomputed and offloaded, its bytes and the cheapest choice.

The bytes that a block saves follow `model.decoder.Block` tensor by tensor; tests compare them with what autograd saves.
All are per token of one microbatch on one rank. Over all heads, Q is the width of this rank's queries, K that of its
keys, F its feed-forward columns.

`solve` chooses under a memory budget. Blocks run backward from the last to the first. While a segment runs, everything
saved by the segments before it is still there, so the budget must hold at every such moment. Solved by dynamic
programming over (blocks done, bytes saved so far), after the knapsack form of Beaumont et al. 2021, "Efficient
Combination of Rematerialization and Offloading" and of PyTorch's memory-budget partitioner.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from modelwright.core.config import ConfigError, constant, only_for
from modelwright.model.decoder import ModelConfig

Mode = Literal["none", "full", "selective", "budget"]
Tier = Literal["none", "host", "disk"]
"""Target of offloading: where saved activations are kept instead of the device's memory."""
Operator = Literal["q_proj", "k_proj", "v_proj", "attend", "o_proj", "gate_proj", "up_proj"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
"""The expensive operators of a block in the order in which they run; their outputs may be kept.

`down_proj` is the last one: nothing in the block's backward pass needs its output, so it is never computed again.
"""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Settings of saving, recomputing and offloading activations."""

    mode: Mode = "none"
    """`none` saves everything; `full` saves the input of every `layers_per_segment` blocks and recomputes the rest;
    `selective` saves each block's input and the outputs in `save_outputs_of`; `budget` chooses for every block so that
    one rank's activations fit `budget_bytes` at the least extra cost."""
    layers_per_segment: int = field(default=8, metadata=only_for("mode", "full"))
    """`full`: consecutive blocks that are recomputed together."""
    save_outputs_of: tuple[Operator, ...] = constant(OPERATORS)
    """`selective`: operators whose outputs are saved. Norms, rotary embeddings and gating are always recomputed."""
    budget_bytes: int = 0
    """`budget`: bytes of activations on one rank; a number, or 180MiB."""
    offload: Tier = "none"
    """Move saved activations to host memory (models on an accelerator) or to disk: all of them, or in mode `budget`
    those for which it is cheaper than recomputing."""
    offload_dir: str = constant("")
    """Folder for `offload: disk`; "" is the run's own."""
    flops_per_byte: float = 0.0
    """FLOPs that could be computed while one byte moves to or from the offload target; needed by mode `budget` with
    offload, measured by `modelwright plan memory --offload`."""

    def __post_init__(self) -> None:
        if self.layers_per_segment < 1:
            raise ConfigError(f"layers_per_segment: must be at least 1, got {self.layers_per_segment}")
        if len(set(self.save_outputs_of)) != len(self.save_outputs_of):
            raise ConfigError(f"save_outputs_of: an operator is named twice: {', '.join(self.save_outputs_of)}")
        if self.mode == "selective" and not self.save_outputs_of:
            raise ConfigError(
                "save_outputs_of: is empty; mode full with layers_per_segment 1 saves only each block's input"
            )
        if self.budget_bytes < 0 or (self.budget_bytes > 0) != (self.mode == "budget"):
            raise ConfigError(
                f"budget_bytes: must be above 0 with mode budget else 0, got {self.budget_bytes} with {self.mode}"
            )
        if self.flops_per_byte < 0 or (self.flops_per_byte == 0) == (self.mode == "budget" and self.offload != "none"):
            raise ConfigError(
                f"flops_per_byte: must be above 0 with mode budget and offload, else 0, got {self.flops_per_byte}; "
                "`modelwright plan memory TARGET --offload disk` measures it"
            )
        if self.offload_dir and self.offload != "disk":
            raise ConfigError(f"offload_dir: applies to offload disk, not {self.offload}; leave it out")


Compute = Literal["fp32", "bf16"]
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive blocks that are treated alike.

    recompute false: they save all that backward needs. True: they save the input of the first block and the outputs of
    the operators in `keep`, and recompute the rest, all blocks at once. `keep` needs segments of one block. offload:
    saved tensors are moved to host memory or disk.
    """

    num_layers: int
    recompute: bool
    keep: tuple[Operator, ...] = ()
    offload: bool = False

    def __post_init__(self) -> None:
        assert self.num_layers > 0
        assert not self.keep or (self.recompute and self.num_layers == 1)


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Widths of one block on one rank, and the bytes and FLOPs that follow from them.

    stream_dim: width of the residual stream that this rank holds per token of the microbatch: D, or its share of D
    where ranks divide the tokens between the products (sequence parallelism). fused: norms and activations are single
    kernels (`ops.cpu_kernels`), which keep only their inputs. post_norms: two further norms, of the outputs that are
    added to the stream. has_gated_kernel: true if such a kernel exists for the activation.
    """

    model_dim: int
    stream_dim: int
    num_heads: int
    num_kv_heads: int
    query_dim: int
    kv_dim: int
    ffn_dim: int
    qk_norm: bool
    compute: Compute
    mean_context: float
    fused: bool = False
    post_norms: bool = False
    has_gated_kernel: bool = True

    @property
    def width(self) -> int:
        """Bytes of an element that a matrix product computes."""
        return FP32_BYTES if self.compute == "fp32" else 2

    @property
    def whole_bytes(self) -> int:
        """Bytes that backward needs if nothing is recomputed.

        Two norms: normalized input in FP32 and one divisor; their outputs. Q/K-norm: the same for each head. Attention:
        rotated q and k, v, output, log of the softmax's denominator. Feed-forward: gate, up, silu(gate), their product.
        Where fused, norms keep their input instead, in FP32 for the stream and in the products' own format for queries
        and keys, and silu(gate) is not kept. Norms of outputs keep the same for the outputs of the products.
        """
        normed = self.query_dim + self.kv_dim if self.qk_norm else 0
        divisors = 2 + (self.num_heads + self.num_kv_heads if self.qk_norm else 0)
        wide = FP32_BYTES * (2 * self.stream_dim + divisors + self.num_heads)
        wide += (self.width if self.fused else FP32_BYTES) * normed
        if self.post_norms:
            wide += 2 * ((self.width if self.fused else FP32_BYTES) * self.stream_dim + FP32_BYTES)
        ffn = (3 if self.fused and self.has_gated_kernel else 4) * self.ffn_dim
        return wide + self.width * (2 * self.model_dim + 2 * self.query_dim + 2 * self.kv_dim + ffn)

    @property
    def workspace_bytes(self) -> int:
        """Working memory of the block's backward: gradients of product, gate and up, and of two hidden states."""
        return self.width * 3 * self.ffn_dim + FP32_BYTES * 2 * self.stream_dim

    def output_bytes(self, operator: Operator) -> int:
        """The output of an operator, which is the cost of `keep`."""
        if operator == "attend":
            return self.width * self.query_dim + FP32_BYTES * self.num_heads
        columns = {"q_proj": self.query_dim, "k_proj": self.kv_dim, "v_proj": self.kv_dim, "o_proj": self.model_dim}
        return self.width * columns.get(operator, self.ffn_dim)

    def flops(self, operator: Operator) -> float:
        """FLOPs of one forward pass of an operator, which `keep` saves."""
        if operator == "attend":
            return 4.0 * self.query_dim * self.mean_context
        if operator == "o_proj":
            return 2.0 * self.query_dim * self.model_dim
        return 2.0 * self.model_dim * self.output_bytes(operator) / self.width

    @property
    def forward_flops(self) -> float:
        return sum(map(self.flops, OPERATORS)) + 2.0 * self.ffn_dim * self.model_dim

    def saved_bytes(self, segment: Segment) -> int:
        """Bytes that all blocks of the segment save from forward to backward, on the device or elsewhere."""
        if not segment.recompute:
            return segment.num_layers * self.whole_bytes
        # The input of the first block, which is the residual stream, is FP32 in either case.
        return FP32_BYTES * self.stream_dim + sum(map(self.output_bytes, segment.keep))

    def kept_bytes(self, segment: Segment) -> int:
        """The part of `saved_bytes` that stays in device memory."""
        return 0 if segment.offload else self.saved_bytes(segment)

    def moved_bytes(self, segment: Segment) -> int:
        """Bytes that leave the device and return."""
        return 2 * self.saved_bytes(segment) if segment.offload else 0

    def moment_bytes(self, segment: Segment) -> int:
        """Extra bytes while the segment runs backward: its recomputed or fetched tensors, and one block's workspace."""
        again = segment.num_layers * self.whole_bytes - sum(map(self.output_bytes, segment.keep))
        back = self.saved_bytes(segment) if segment.offload else 0
        return self.workspace_bytes + (max(0, again) if segment.recompute else 0) + back

    def recomputed_flops(self, segment: Segment) -> float:
        """FLOPs that the segment recomputes."""
        if not segment.recompute:
            return 0.0
        # The last product of a segment is not recomputed, because nothing in backward needs its output (for PyTorch's
        # own products and those of `ops.matmul`).
        spared = sum(map(self.flops, segment.keep)) + 2.0 * self.ffn_dim * self.model_dim
        return segment.num_layers * self.forward_flops - spared


def block_shape(
    model: ModelConfig,
    *,
    compute: Compute,
    mean_context: float,
    tensor: int = 1,
    sequence_parallel: bool = False,
    fused: bool = False,
) -> BlockShape:
    """The shape of a rank's block if `tensor` ranks divide heads and columns. Raises `ConfigError` if they cannot."""
    for name in ("num_heads", "num_kv_heads", "ffn_dim"):
        if getattr(model, name) % tensor:
            raise ConfigError(f"tensor: {tensor} does not divide {name} {getattr(model, name)}")
    return BlockShape(
        model_dim=model.model_dim,
        stream_dim=model.model_dim // tensor if sequence_parallel else model.model_dim,
        num_heads=model.num_heads // tensor,
        num_kv_heads=model.num_kv_heads // tensor,
        query_dim=model.num_heads * model.head_dim // tensor,
        kv_dim=model.num_kv_heads * model.head_dim // tensor,
        ffn_dim=model.ffn_dim // tensor,
        qk_norm=model.qk_norm,
        compute=compute,
        mean_context=mean_context,
        fused=fused,
        post_norms=model.norms.post_norms,
        has_gated_kernel=model.feed_forward.activation == "silu",
    )


def total_kept_bytes(shape: BlockShape, segments: Iterable[Segment]) -> int:
    """Bytes per token that all blocks save."""
    return sum(map(shape.kept_bytes, segments))


def total_moved_bytes(shape: BlockShape, segments: Iterable[Segment]) -> int:
    """Bytes per token that are offloaded and fetched."""
    return sum(map(shape.moved_bytes, segments))


def peak_bytes(shape: BlockShape, segments: Sequence[Segment]) -> int:
    """The most bytes per token that the blocks of one microbatch hold while they run backward, last to first."""
    # While a segment runs backward, everything that the segments before it have saved is still held.
    kept = peak = 0
    for segment in segments:
        kept += shape.kept_bytes(segment)
        peak = max(peak, kept + shape.moment_bytes(segment))
    return peak


def total_recomputed_flops(shape: BlockShape, segments: Iterable[Segment]) -> float:
    """FLOPs per token that all blocks recompute."""
    return sum(map(shape.recomputed_flops, segments))


def head_workspace_bytes(model: ModelConfig, *, num_tokens: int, chunk_tokens: int, tensor: int = 1) -> int:
    """Bytes of a chunk of logits and of the gradient of the head's weight, on one rank."""
    # The logits become their softmax and their gradient in place, and coexist once with their cast to 16 bits.
    chunk = min(chunk_tokens, num_tokens)
    return FP32_BYTES * (model.vocab_size // tensor) * (3 * chunk // 2 + model.model_dim)


_QUANTA = 2**13
"""Steps into which the budget is divided; saved bytes are rounded up to whole steps, so the budget always holds."""
_MAX_UNIT_LAYERS = 16
"""Longest segment that is tried: longer ones save few inputs more, for much more memory while they are recomputed."""
_CAPS = 24
"""Caps on the saved bytes that are tried where several microbatches are in flight."""


@dataclass(frozen=True, kw_only=True)
class SegmentChoice:
    """A treatment of a segment's blocks: bytes saved until backward, extra bytes during it, and cost in FLOPs."""

    segment: Segment
    kept_bytes: int
    moment_bytes: int
    cost: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit of the activations of one rank.

    in_flight: microbatches whose activations are held at once (a pipeline's stages hold several); end_bytes: needed
    between the last block's forward and its backward (the head's chunk of logits).
    """

    num_bytes: int
    in_flight: int = 1
    end_bytes: int = 0


def block_choices(
    shape: BlockShape, num_tokens: int, num_layers: int, *, flops_per_byte: float = 0.0
) -> list[SegmentChoice]:
    """The choices for homogeneous blocks: save everything; save the outputs that cost most per byte; segments of
    blocks. flops_per_byte: cost in FLOPs of each byte that leaves or returns if saved tensors may also be offloaded;
    0 disables offloading.
    """
    by_cost = sorted(OPERATORS, key=lambda name: shape.flops(name) / shape.output_bytes(name), reverse=True)
    segments = [Segment(num_layers=1, recompute=False)]
    for count in range(1, len(by_cost) + 1):
        keep = tuple(sorted(by_cost[:count], key=OPERATORS.index))
        segments.append(Segment(num_layers=1, recompute=True, keep=keep))
    units = range(1, min(_MAX_UNIT_LAYERS, num_layers) + 1)
    segments += [Segment(num_layers=n, recompute=True) for n in units]
    if flops_per_byte:
        segments += [replace(segment, offload=True) for segment in segments]
    return [
        SegmentChoice(
            segment=segment,
            kept_bytes=num_tokens * shape.kept_bytes(segment),
            moment_bytes=num_tokens * shape.moment_bytes(segment),
            cost=num_tokens * (shape.recomputed_flops(segment) + flops_per_byte * shape.moved_bytes(segment)),
        )
        for segment in segments
    ]


def solve(choices: Sequence[SegmentChoice], num_layers: int, budget: Budget) -> list[SegmentChoice]:
    """The cheapest sequence of choices for `num_layers` blocks within the budget.

    Exact up to rounding saved bytes to 1/8192 of the budget. With several microbatches in flight the others hold all
    that the blocks save, so the solver tries caps on that total. Raises `ConfigError` that names the least budget.
    """
    best = _best(choices, num_layers, budget)
    if best is not None:
        return best
    raise ConfigError(
        f"budget_bytes: {budget.num_bytes} is not enough for the activations of {num_layers} blocks; the minimum "
        f"is about {least_budget(choices, num_layers, budget)}; use smaller microbatches or more ranks"
    )


def peak(way: Sequence[SegmentChoice], budget: Budget) -> int:
    """The most bytes held at once."""
    kept = itertools.accumulate(choice.kept_bytes for choice in way)
    moments = [before + choice.moment_bytes for before, choice in zip(kept, way, strict=True)]
    total = sum(choice.kept_bytes for choice in way)
    return (budget.in_flight - 1) * total + max(*moments, total + budget.end_bytes)


def total_cost(way: Sequence[SegmentChoice]) -> float:
    return math.fsum(choice.cost for choice in way)


def least_budget(choices: Sequence[SegmentChoice], num_layers: int, budget: Budget) -> int:
    """The smallest budget that has a solution, to about a percent."""
    # Doubled until it suffices, then bisected: solutions do not get worse with more bytes.
    low, high = 1, max(1, budget.num_bytes)
    while _best(choices, num_layers, replace(budget, num_bytes=high)) is None:
        high *= 2
    while high - low > high // 100:
        middle = (low + high) // 2
        result = _best(choices, num_layers, replace(budget, num_bytes=middle))
        low, high = (low, middle) if result else (middle, high)
    return high


def _best(choices: Sequence[SegmentChoice], num_layers: int, budget: Budget) -> list[SegmentChoice] | None:
    others = budget.in_flight - 1
    if not others:
        return _solve_capped(choices, num_layers, budget, budget.num_bytes)
    # The other microbatches hold `others` times the saved total, which is unknown before a solution: caps are tried.
    caps = [budget.num_bytes * step // (_CAPS * budget.in_flight) for step in range(1, _CAPS + 1)]
    ways = [
        _solve_capped(choices, num_layers, replace(budget, num_bytes=budget.num_bytes - others * c), c) for c in caps
    ]
    return min((way for way in ways if way), key=total_cost, default=None)


def _solve_capped(
    choices: Sequence[SegmentChoice], num_layers: int, budget: Budget, cap: int
) -> list[SegmentChoice] | None:
    """The cheapest sequence for one microbatch in flight that saves at most `cap` bytes in total."""
    quantum = max(1, budget.num_bytes // _QUANTA)
    steps = budget.num_bytes // quantum
    # costs[n, b]: least cost of the first n layers with b quanta saved; taken[n, b]: the choice that ends there.
    costs = np.full((num_layers + 1, steps + 1), np.inf)
    taken = np.full((num_layers + 1, steps + 1), -1, dtype=np.int16)
    costs[0, 0] = 0.0
    sizes = [-(-choice.kept_bytes // quantum) for choice in choices]
    for layer in range(num_layers):
        for index, choice in enumerate(choices):
            end = layer + choice.segment.num_layers
            # Above what is saved before and by the segment, its backward needs room for the moment's bytes.
            highest = steps - sizes[index] - -(-choice.moment_bytes // quantum)
            if end > num_layers or highest < 0:
                continue
            reached = costs[layer, : highest + 1] + choice.cost
            target = slice(sizes[index], sizes[index] + highest + 1)
            better = reached < costs[end, target]
            costs[end, target][better] = reached[better]
            taken[end, target][better] = index
    last = min(cap, budget.num_bytes - budget.end_bytes) // quantum
    if last < 0 or not np.isfinite(costs[num_layers, : last + 1]).any():
        return None
    way: list[SegmentChoice] = []
    layer, kept = num_layers, int(np.argmin(costs[num_layers, : last + 1]))
    while layer:
        index = int(taken[layer, kept])
        way.append(choices[index])
        layer, kept = layer - choices[index].segment.num_layers, kept - sizes[index]
    return way[::-1]
