"""The paged cache: what is written at a slot is read in the order of a block table, and a head's tokens of a block lie
one after the other.
"""

import torch

from modelwright.infer.kv_cache import PagedCache
from modelwright.model.decoder import ModelConfig

CONFIG = ModelConfig(
    vocab_size=8, num_layers=2, model_dim=16, num_heads=4, num_kv_heads=2, ffn_dim=16, head_dim=4, max_seq_len=32
)
BLOCK_LEN, TABLES = 4, [[3, 1], [2, 5]]


def filled() -> tuple[PagedCache, torch.Tensor, torch.Tensor]:
    """A cache with eight tokens of two sequences in its second layer, and these tokens [B, T, K, d]."""
    cache = PagedCache(CONFIG, 5, BLOCK_LEN, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 8, 2, 4, generator=generator) for _ in range(2))
    slots = torch.tensor([[table[at // BLOCK_LEN] * BLOCK_LEN + at % BLOCK_LEN for at in range(8)] for table in TABLES])
    order = torch.randperm(16, generator=generator)
    cache.write(1, slots.flatten()[order], keys.flatten(0, 1)[order], values.flatten(0, 1)[order])
    return cache, keys, values


def test_tokens_are_read_in_the_order_of_the_block_tables() -> None:
    cache, keys, values = filled()
    for dtype in (torch.float32, torch.float64):
        read = cache.read(1, torch.tensor(TABLES).flatten(), 2, dtype)
        assert torch.equal(read[0], keys.to(dtype))
        assert torch.equal(read[1], values.to(dtype))
    assert not any(one.any() for one in cache.read(0, torch.tensor(TABLES).flatten(), 2, torch.float32))


def test_a_head_has_the_tokens_of_a_block_one_after_the_other() -> None:
    cache, keys, values = filled()
    for stored, given in zip(cache.layer(1), (keys, values), strict=True):
        assert stored.is_contiguous()
        assert torch.equal(stored[3, 1].flatten(), given[0, :BLOCK_LEN, 1].flatten())


def test_a_copied_block_has_the_tokens_of_all_layers() -> None:
    cache, keys, _ = filled()
    cache.copy([3], [4])
    assert torch.equal(cache.read(1, torch.tensor([4]), 1, torch.float32)[0][0], keys[0, :BLOCK_LEN])
