"""Time of one microbatch on one rank, operator by operator: products, attention, and work that only moves memory.

A product takes its FLOPs at the share of the peak that large ones reach, plus its operands through the device's memory
(a roofline whose two sides do not overlap), so that small and narrow products are slower. Communication and pipeline
are in `layout_search`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from modelwright.core.config import ConfigError
from modelwright.train.memory.activations import BlockShape, Segment
from modelwright_plan.bubble import StageTime


@dataclass(frozen=True, kw_only=True)
class ComputeRate:
    """Rates that a device reaches in training.

    peak_flops_per_s: rate of dense products, from the data sheet or measured; product_share, attention_share: shares of
    it that large products and fused attention reach; memory_s_per_byte: seconds in which a byte moves through the
    device's memory, 0 if the shares include that; cast_bytes: bytes moved for each element that is scaled and rounded
    before a product; source: where the shares come from.
    """

    peak_flops_per_s: float
    product_share: float
    attention_share: float
    source: str
    memory_s_per_byte: float = 0.0
    cast_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.peak_flops_per_s <= 0:
            raise ConfigError(f"flops: must be above 0, got {self.peak_flops_per_s}")
        for share in (self.product_share, self.attention_share):
            if not 0.0 < share <= 1.0:
                raise ConfigError(f"efficiency: must be above 0 and at most 1, got {share}; 0.4 is 40% of the peak")

    def product_s(self, num_tokens: int, inputs: int, outputs: int, *, width: int) -> float:
        """Computes the seconds of a product of `num_tokens` x `inputs` by `inputs` x `outputs` elements of `width`
        bytes.
        """
        moved = width * (num_tokens * (inputs + outputs) + inputs * outputs)
        flops = 2.0 * num_tokens * inputs * outputs
        return flops / (self.peak_flops_per_s * self.product_share) + moved * self.memory_s_per_byte


ATTENTION_BACKWARD = 2.5
"""FLOPs of fused attention's backward pass by those of its forward pass: five products against two, because scores are
recomputed (Dao 2023, FlashAttention-2, section 4.1)."""
WEIGHT_BYTES = 6 + 8
"""Bytes moved for each weight of a microbatch: cast from FP32 to 16 bits, gradient added in FP32."""
LOGIT_BYTES = 4
"""Bytes of a logit in one pass; its loss takes two passes forward and two backward, in FP32."""
OPTIMIZER_PASSES = 2.0
"""States that AdamW moves, as a multiple of weight, gradient and two moments: all are read, three are written, and the
gradient is read once more for its norm."""


def operator_seconds(shape: BlockShape, num_tokens: int, rate: ComputeRate) -> dict[str, float]:
    """Computes the seconds of each operator in a block's forward pass; "elementwise" is what has no product."""
    dim, query, kv, ffn = shape.model_dim, shape.query_dim, shape.kv_dim, shape.ffn_dim
    matrices = {
        "q_proj": (dim, query),
        "k_proj": (dim, kv),
        "v_proj": (dim, kv),
        "o_proj": (query, dim),
        "gate_proj": (dim, ffn),
        "up_proj": (dim, ffn),
        "down_proj": (ffn, dim),
    }
    result = {name: rate.product_s(num_tokens, *sizes, width=shape.width) for name, sizes in matrices.items()}
    result["attend"] = num_tokens * shape.flops("attend") / (rate.peak_flops_per_s * rate.attention_share)
    # Norms read and write the stream, additions read two and write one; rotation reads and writes queries and keys,
    # gating reads two and writes one. Products of the same input share its cast.
    moved = shape.width * (2 * (2 + 3) * shape.stream_dim + 2 * (query + kv) + 3 * ffn)
    moved += rate.cast_bytes * (2 * dim + query + ffn)
    result["elementwise"] = num_tokens * moved * rate.memory_s_per_byte
    return result


def block_time(shape: BlockShape, num_tokens: int, rate: ComputeRate) -> StageTime:
    """Computes the seconds of one block for one microbatch, without recomputation."""
    forward = operator_seconds(shape, num_tokens, rate)
    forward_s = sum(forward.values())
    products = forward_s - forward["attend"] - forward["elementwise"]
    num_weights = shape.model_dim * (2 * shape.query_dim + 2 * shape.kv_dim + 3 * shape.ffn_dim)
    return StageTime(
        forward_s=forward_s,
        input_s=products + ATTENTION_BACKWARD * forward["attend"] + 2 * forward["elementwise"],
        weight_s=products + (WEIGHT_BYTES + rate.cast_bytes) * num_weights * rate.memory_s_per_byte,
    )


def recomputed_s(shape: BlockShape, segments: Iterable[Segment], num_tokens: int, rate: ComputeRate) -> float:
    """Computes the seconds that all segments take to recompute what they have not saved."""
    seconds = operator_seconds(shape, num_tokens, rate)
    block_s = sum(seconds.values())
    # The last product of a segment is not recomputed (`BlockShape.recomputed_flops`).
    return sum(
        segment.num_layers * block_s - sum(seconds[name] for name in segment.keep) - seconds["down_proj"]
        for segment in segments
        if segment.recompute
    )


def head_time(model_dim: int, num_logits: int, num_tokens: int, rate: ComputeRate, *, width: int) -> StageTime:
    """Computes the seconds of the head and its loss. num_logits: logits of a token on this rank."""
    product_s = rate.product_s(num_tokens, model_dim, num_logits, width=width)
    loss_s = 2 * LOGIT_BYTES * num_tokens * num_logits * rate.memory_s_per_byte
    return StageTime(forward_s=product_s + loss_s, input_s=product_s + loss_s, weight_s=product_s)
