"""The paged key/value cache: fixed-size blocks handed out to sequences, as in vLLM (Kwon et al. 2023).

Block 0 is never handed out: padded entries of block tables point at it, and their contents are masked.

Legend: L blocks, S tokens per block, B sequences, N tokens, K key/value heads, d head width.
"""

import torch
from torch import Tensor

from modelwright.infer.sequence import Sequence
from modelwright.model.config import ModelConfig


class BlockManager:
    """Counts and allocates blocks."""

    def __init__(self, num_blocks: int, block_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_len = block_len
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """How many more blocks `sequence` needs before it can hold `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_len) - len(sequence.block_table))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate room for `num_tokens` tokens of `sequence`; false, with nothing changed, if blocks are short."""
        needed = self.num_needed(sequence, num_tokens)
        if needed > len(self._free):
            return False
        sequence.block_table.extend(self._free.pop() for _ in range(needed))
        return True

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of `sequence`; its cache is gone."""
        self._free.extend(reversed(sequence.block_table))
        sequence.block_table.clear()
        sequence.num_cached = 0


class PagedCache:
    """Keys and values of every layer, [L, S, K, d] each."""

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_len: int, *, dtype: torch.dtype, device: torch.device
    ):
        shape = (model.num_layers, num_blocks + 1, block_len, model.num_kv_heads, model.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self.block_len = block_len

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def write(self, layer: int, slots_N: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> None:
        """Store tokens at `slots_N` (block number x block length + offset). While a model trains in BF16 its layers
        compute in a narrower format than the weights, whose format the cache has; storing them loses nothing.
        """
        self._keys[layer].flatten(0, 1).index_copy_(0, slots_N, k_NKd.to(self._keys.dtype))
        self._values[layer].flatten(0, 1).index_copy_(0, slots_N, v_NKd.to(self._values.dtype))

    def read(self, layer: int, table: Tensor, num_sequences: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [B, tokens, K, d] of sequences whose block tables, equally long, are concatenated, in the
        format of the queries.
        """
        keys = self._keys[layer].index_select(0, table).to(dtype)
        values = self._values[layer].index_select(0, table).to(dtype)
        _, _, num_heads, width = keys.shape
        view = (num_sequences, -1, num_heads, width)
        return keys.view(view), values.view(view)
