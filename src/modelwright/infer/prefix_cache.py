"""Which beginnings of prompts the key/value cache holds already, by a hash chained over blocks as in vLLM.

A hit ends at a multiple of the prefill chunk, and at the latest before a prompt's last token, whose logits are needed.
So the rest of a prompt is computed in the same chunks as without a hit, and a hit changes no bit. Only tokens that were
computed in chunks are found again: decoding one token at a time rounds differently.
"""

import hashlib
import json
import math
from array import array

from modelwright.infer.kv_cache import BlockManager
from modelwright.infer.sequence import Sequence
from modelwright.ops.rope_scaling import RopeScaling


class PrefixCache:
    """Finds and stores the blocks of whole chunks. enabled: False finds nothing.

    Two prompts share blocks only if their sequences have the same `cache_salt` and `adapter`, the same images up to
    there, and, where the rotary frequencies depend on the length of the sequence, the same frequencies.
    """

    def __init__(self, blocks: BlockManager, rope: RopeScaling, *, prefill_chunk: int, enabled: bool) -> None:
        self._blocks = blocks
        self._rope = rope
        self._unit_len = math.lcm(prefill_chunk, blocks.block_len)
        self._enabled = enabled
        self.num_queries = 0
        """Prompt tokens that were looked up so far."""
        self.num_hits = 0
        """Those of them that were found."""

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks with the longest known beginning of a sequence's prompt. None of them is taken yet."""
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
        """Record that a sequence starts with so many blocks that were found."""
        if self._enabled and sequence.num_cacheable:
            self.num_queries += sequence.num_prefill
            self.num_hits += num_blocks * self._blocks.block_len

    def store(self, sequence: Sequence, start: int) -> None:
        """Make the chunks of a sequence that are in the cache known, those before token `start` excepted."""
        if not self._enabled:
            return
        block_len = self._blocks.block_len
        first = start // self._unit_len * self._unit_len // block_len
        last = min(sequence.num_cached, sequence.num_prefill) // self._unit_len * self._unit_len // block_len
        hashes = self._hashes(sequence)
        for index in range(first, last):
            self._blocks.store(sequence.block_table[index], hashes[index])

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """The hash of each block of whole chunks of the prompt, computed once per length of the prompt."""
        block_len = self._blocks.block_len
        num_blocks = sequence.num_prefill // self._unit_len * self._unit_len // block_len
        if sequence.hashed_len != sequence.num_prefill:
            sequence.hashed_len = sequence.num_prefill
            sequence.block_hashes = []
            before = json.dumps([sequence.cache_salt, sequence.adapter, self._frequencies(sequence)]).encode()
            for start in range(0, num_blocks * block_len, block_len):
                end = start + block_len
                tokens = array("q", sequence.token_ids[start:end]).tobytes()
                images = [one.digest for one in sequence.images if one.has_tokens_in(start, end)]
                before = hashlib.sha256(b"".join([before, tokens, *images])).digest()
                sequence.block_hashes.append(before)
        return sequence.block_hashes

    def _frequencies(self, sequence: Sequence) -> int:
        """A number that is equal only for sequences with the same rotary frequencies."""
        is_scaled = self._rope.depends_on_length and sequence.num_prefill > self._rope.original_max_len
        return sequence.num_prefill if is_scaled else 0
