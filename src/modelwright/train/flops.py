"""FLOPs outside the projections, computed from the batch: attention and head, forward.

A token attends to itself and to earlier tokens of its document. Backward costs twice as much.
"""

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.adapter_config import AdapterConfig
from modelwright.model.adapters import adapter_flops, projection_sizes
from modelwright.model.config import ModelConfig


def attention_flops(shape: ModelConfig, batch: TokenBatch, layer: int) -> int:
    """FLOPs of one layer's scores and values, 2 per multiply-add."""
    contexts_BT = batch.positions_BT + 1
    if window := shape.window_of(layer):
        contexts_BT = contexts_BT.clamp(max=window)
    contexts = int((contexts_BT * (batch.segments_BT >= 0)).sum())
    return 4 * shape.num_heads * shape.head_dim * contexts


def all_attention_flops(shape: ModelConfig, batch: TokenBatch) -> int:
    """FLOPs of all layers' scores and values."""
    return sum(attention_flops(shape, batch, layer) for layer in range(shape.num_layers))


def head_flops(shape: ModelConfig, batch: TokenBatch) -> int:
    """FLOPs of the head; ignored labels cost none."""
    return 2 * batch.num_targets * shape.vocab_size * shape.model_dim


def adapter_step_flops(shape: ModelConfig, adapters: AdapterConfig, *, num_tokens: float, num_targets: float) -> float:
    """Change that adapters make to the FLOPs of forward and backward: their own products come in addition, and the
    gradients of the frozen weights are not computed. num_targets: tokens that reach the head.
    """
    if not adapters.r:
        return 0.0
    # Per parameter of a frozen weight, backward leaves out one product of 2 FLOPs: the weight's gradient.
    frozen = sum(2 * outputs * inputs for outputs, inputs in projection_sizes(shape).values())
    per_token = 3 * adapter_flops(shape, adapters) - frozen
    return num_tokens * per_token - num_targets * 2 * shape.vocab_size * shape.model_dim


def dense_flops(shape: ModelConfig, batch: TokenBatch) -> int:
    """FLOPs of a dense forward and backward pass, padding included, because it is computed too."""
    # Queries and outputs have all heads, keys and values the shared ones; the feed-forward has three matrices.
    attention = shape.model_dim * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    products = 2 * batch.num_tokens * (attention + 3 * shape.model_dim * shape.ffn_dim)
    return 3 * (shape.num_layers * products + all_attention_flops(shape, batch) + head_flops(shape, batch))
