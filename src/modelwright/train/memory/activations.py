"""Bytes that a block of the decoder saves for its backward pass, and the cost of recomputing them.

The figures follow `model.decoder.Block` tensor by tensor; tests compare them with what autograd saves. All are per
token of one microbatch on one rank. Over all heads, Q is the width of this rank's queries, K that of its keys, F its
feed-forward columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.core.errors import ConfigError
from modelwright.model.config import ModelConfig
from modelwright.train.memory.config import OPERATORS, Operator

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
        # own products and those of `ops.linear_gemms`).
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
