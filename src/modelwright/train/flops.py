"""FLOPs outside the projections, computed from the batch: attention and head, forward.

A token attends to itself and to earlier tokens of its document. Backward costs twice as much.
"""

from modelwright.data.batch import TokenBatch
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


def dense_flops(shape: ModelConfig, batch: TokenBatch) -> int:
    """FLOPs of a dense forward and backward pass, padding included, because it is computed too."""
    attention = shape.model_dim * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    products = 2 * batch.num_tokens * (attention + 3 * shape.model_dim * shape.ffn_dim)
    return 3 * (shape.num_layers * products + all_attention_flops(shape, batch) + head_flops(shape, batch))
