"""Small decoders for the model tests."""

from typing import Any

from modelwright.model.decoder import Decoder, ModelConfig


def make_config(**changes: Any) -> ModelConfig:
    """Two blocks of width 32; grouped heads whose total width differs from the model's."""
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "num_layers": 2,
        "model_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 48,
        "head_dim": 12,
        "max_seq_len": 64,
        "init_std": 0.1,
        "embedding_init_std": 0.1,
    }
    return ModelConfig(**{**shape, **changes})


def make_decoder(**changes: Any) -> Decoder:
    model = Decoder(make_config(**changes))
    model.init_weights(0)
    return model
