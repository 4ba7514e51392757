"""Activation checkpointing: equal gradients, fewer bytes kept."""

import pytest
import torch

from modelwright.core.errors import ConfigError
from modelwright.memory.checkpointing import checkpoint_blocks
from modelwright.model.attention import packed_attend
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder

CONFIG = ModelConfig(
    vocab_size=50, num_layers=4, model_dim=32, num_heads=4, num_kv_heads=2, ffn_dim=96, head_dim=8, max_seq_len=24
)


def gradients_and_kept_bytes(every):
    model = Decoder(CONFIG)
    model.init_weights(3)
    names = list(model.state_dict())
    if every:
        checkpoint_blocks(model, every)
    assert list(model.state_dict()) == names
    tokens = torch.arange(48).view(2, 24)
    positions = torch.arange(24).repeat(2, 1)
    segments = (torch.arange(24) // 10).int().repeat(2, 1)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(tokens, positions, packed_attend(segments))
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    (hidden * torch.linspace(-1, 1, 32)).sum().backward()
    return [p.grad for p in model.parameters()], sum(kept.values())


def test_gradients_are_equal_and_memory_falls_with_every_block_more():
    plain, all_bytes = gradients_and_kept_bytes(0)
    half, half_bytes = gradients_and_kept_bytes(2)
    full, few_bytes = gradients_and_kept_bytes(1)
    for reference, *others in zip(plain, half, full, strict=True):
        assert all(torch.equal(reference, other) for other in others)
    assert few_bytes < half_bytes < all_bytes
    assert few_bytes < 0.3 * all_bytes


def test_zero_is_no_pass():
    with pytest.raises(ConfigError, match="leave the pass out"):
        checkpoint_blocks(Decoder(CONFIG), 0)
