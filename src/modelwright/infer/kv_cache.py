"""The paged key/value cache: fixed-size blocks allocated to sequences, as in vLLM (Kwon et al. 2023), and the lookup of
prompts whose blocks are still in it.

Block 0 is never allocated: padded entries of block tables point at it, and their contents are masked.

Legend: L blocks, S tokens per block, B sequences, N tokens, K key/value heads, d head width.
"""

import hashlib
import json
import math
from array import array
from collections import OrderedDict

import torch
from torch import Tensor

from modelwright.infer.sequence import Sequence
from modelwright.model.decoder import ModelConfig
from modelwright.ops.rope_norm_swiglu import RopeScaling


class BlockManager:
    """Counts, allocates and shares blocks. A block belongs to as many sequences as refer to it. One that holds a known
    beginning of a prompt (`store`) can be found again (`find`), also when it is free; of those, the least recently used
    one is overwritten when no other block is free.
    """

    def __init__(self, num_blocks: int, block_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_len = block_len
        self._free = list(range(num_blocks, 0, -1))
        self._num_users = [0] * (num_blocks + 1)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._reusable: OrderedDict[int, None] = OrderedDict()
        """Free blocks that can still be found, the least recently used one first."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._reusable)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate room for `num_tokens` tokens of `sequence`; false, with nothing changed, if blocks are short."""
        return self.share(sequence, [], num_tokens)

    def share(self, sequence: Sequence, blocks: list[int], num_tokens: int) -> bool:
        """Give `sequence` the `blocks`, which other sequences may use, too, and new ones, up to room for `num_tokens`
        tokens; false, with nothing changed, if blocks are short.
        """
        num_new = max(0, -(-num_tokens // self.block_len) - len(sequence.block_table)) - len(blocks)
        # A shared block that is free now counts as free but is not available for the new ones.
        if num_new > self.num_free - sum(block in self._reusable for block in blocks):
            return False
        # Before new ones are taken, so that none of these is overwritten.
        for block in blocks:
            self._reusable.pop(block, None)
            self._num_users[block] += 1
        sequence.block_table.extend(blocks)
        for _ in range(num_new):
            # A block without a known prompt goes first, then the one that was released longest ago: its prompt is the
            # least likely to return.
            block = self._free.pop() if self._free else self._reusable.popitem(last=False)[0]
            if block in self._hash_of:
                del self._block_of[self._hash_of.pop(block)]
            self._num_users[block] = 1
            sequence.block_table.append(block)
        return True

    def release(self, sequence: Sequence) -> None:
        """Free all blocks of `sequence`. Blocks that can be found again are overwritten from the sequence's end on."""
        for block in reversed(sequence.block_table):  # the end first: a block is found only through those before it
            self._num_users[block] -= 1
            if self._num_users[block] == 0 and block in self._hash_of:
                self._reusable[block] = None
            elif self._num_users[block] == 0:
                self._free.append(block)
        sequence.block_table.clear()
        sequence.num_cached = 0

    def find(self, block_hash: bytes) -> int | None:
        """Returns the block that was stored under a hash."""
        return self._block_of.get(block_hash)

    def store(self, block: int, block_hash: bytes) -> None:
        """Let a block be found by the hash of its contents and of all before it, unless one is known already."""
        if block_hash not in self._block_of:
            self._hash_of[block], self._block_of[block_hash] = block_hash, block


class PagedCache:
    """Keys and values of every layer, [L, K, S, d] each: a head's tokens of a block are adjacent in memory, so that
    heads that are not computed are not read. heads_first: they are [K, L, S, d] in memory, so that all tokens of a head
    are one row for a fused kernel.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_len: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        heads_first: bool = False,
    ):
        sizes = (num_blocks + 1, model.num_kv_heads)
        shape = (model.num_layers, *(sizes[::-1] if heads_first else sizes), block_len, model.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        if heads_first:
            self._keys, self._values = self._keys.transpose(1, 2), self._values.transpose(1, 2)
        self.block_len = block_len
        self.heads_first = heads_first

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [L, K, S, d] each, as views of what is stored."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots_N: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> None:
        """Store tokens at `slots_N` (block number x block length + offset). While a model trains in BF16 its layers
        compute in a narrower format than the weights, whose format the cache has; storing them loses nothing.
        """
        # [K, S] becomes [S, K] by a view, so that one indexed store writes all heads.
        blocks_N, places_N = slots_N // self.block_len, slots_N % self.block_len
        self._keys[layer].transpose(1, 2)[blocks_N, places_N] = k_NKd.to(self._keys.dtype)
        self._values[layer].transpose(1, 2)[blocks_N, places_N] = v_NKd.to(self._values.dtype)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks."""
        self._keys[:, targets] = self._keys[:, sources]
        self._values[:, targets] = self._values[:, sources]

    def read(self, layer: int, table: Tensor, num_sequences: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [B, tokens, K, d] of sequences whose block tables, equally long, are concatenated, in the
        format of the queries. In memory heads come before tokens.
        """
        num_heads = self._keys.shape[2]
        if self.heads_first:
            stored_KLSd = (self._keys[layer].transpose(0, 1), self._values[layer].transpose(0, 1))
            found = [one.index_select(1, table).to(dtype) for one in stored_KLSd]
            keys, values = (one.view(num_heads, num_sequences, -1, one.shape[-1]).permute(1, 2, 0, 3) for one in found)
            return keys, values
        heads_K1 = torch.arange(num_heads, device=table.device)[:, None]
        # Block b of head k is row b K + k of the cache seen as [L K, S, d].
        places = (table.view(num_sequences, 1, -1) * num_heads + heads_K1).flatten()

        def taken(stored: Tensor) -> Tensor:
            heads = stored[layer].flatten(0, 1).index_select(0, places).to(dtype)
            return heads.view(num_sequences, num_heads, -1, heads.shape[-1]).transpose(1, 2)

        return taken(self._keys), taken(self._values)


class PrefixCache:
    """Finds the beginnings of prompts that the cache already holds, by a hash chained over blocks as in vLLM. A hit
    ends at a multiple of the prefill chunk, and at the latest before a prompt's last token, whose logits are needed. So
    the rest of a prompt is computed in the same chunks as without a hit, and a hit changes no bit. Only tokens that
    were computed in chunks are found again: decoding one token at a time rounds differently. enabled: False finds
    nothing. Two prompts share blocks only if their sequences have the same `cache_salt` and `adapter`, the same images
    up to there, and, where the rotary frequencies depend on the length of the sequence, the same frequencies.
    """

    def __init__(self, blocks: BlockManager, rope: RopeScaling, *, prefill_chunk: int, enabled: bool) -> None:
        self._blocks = blocks
        self._rope = rope
        # A hit ends where both a prefill chunk and a block end.
        self._unit_len = math.lcm(prefill_chunk, blocks.block_len)
        self._enabled = enabled
        self.num_queries = 0
        """Prompt tokens that were looked up since the start."""
        self.num_hits = 0
        """Prompt tokens that were found since the start."""

    def find(self, sequence: Sequence) -> list[int]:
        """Returns the blocks with the longest known beginning of a sequence's prompt, without taking them."""
        if not self._enabled or not sequence.num_cacheable:
            return []
        unit_blocks = self._unit_len // self._blocks.block_len
        num_usable = sequence.num_cacheable // self._unit_len * unit_blocks
        found: list[int] = []
        for block_hash in self._hashes(sequence)[:num_usable]:
            block = self._blocks.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found[: len(found) // unit_blocks * unit_blocks]

    def count(self, sequence: Sequence, num_blocks: int) -> None:
        """Count the prompt of a sequence as looked up, and `num_blocks` of its blocks as found."""
        if self._enabled and sequence.num_cacheable:
            self.num_queries += sequence.num_prefill
            self.num_hits += num_blocks * self._blocks.block_len

    def store(self, sequence: Sequence, start: int) -> None:
        """Let later prompts find the blocks of a sequence's computed chunks, from the chunk of token `start` on."""
        if not self._enabled:
            return
        block_len = self._blocks.block_len
        first = start // self._unit_len * self._unit_len // block_len
        last = min(sequence.num_cached, sequence.num_prefill) // self._unit_len * self._unit_len // block_len
        hashes = self._hashes(sequence)
        for index in range(first, last):
            self._blocks.store(sequence.block_table[index], hashes[index])

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """Hash of each block of whole chunks of the prompt, computed once per length of the prompt."""
        block_len = self._blocks.block_len
        num_blocks = sequence.num_prefill // self._unit_len * self._unit_len // block_len
        if sequence.hashed_len != sequence.num_prefill:
            sequence.hashed_len = sequence.num_prefill
            sequence.block_hashes = []
            # Keys are shared only where the rotary frequencies are equal, which may depend on the prompt's length.
            is_scaled = self._rope.depends_on_length and sequence.num_prefill > self._rope.original_max_len
            frequencies = sequence.num_prefill if is_scaled else 0
            before = json.dumps([sequence.cache_salt, sequence.adapter, frequencies]).encode()
            for start in range(0, num_blocks * block_len, block_len):
                end = start + block_len
                tokens = array("q", sequence.token_ids[start:end]).tobytes()
                images = [one.digest for one in sequence.images if one.has_tokens_in(start, end)]
                # Chained: a block is equal only if all before it are, too.
                before = hashlib.sha256(b"".join([before, tokens, *images])).digest()
                sequence.block_hashes.append(before)
        return sequence.block_hashes
