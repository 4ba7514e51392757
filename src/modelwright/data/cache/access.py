"""How often each block was read lately, by all processes of a host together."""

from pathlib import Path

import numpy as np

_FILE = "access.bin"
_HEADER_BYTES = 8


class AccessCounts:
    """Counts in a folder that `prepare` has made; a read counts half after `half_life` further ones.

    Processes write without a lock: a count that is lost now and then changes which block is kept, and nothing else.
    """

    def __init__(self, folder: Path, num_blocks: int, *, half_life: int) -> None:
        self._half_life = half_life
        path = folder / _FILE
        self._clock = np.memmap(path, np.int64, mode="r+", shape=(1,))
        self._scores = np.memmap(path, np.float32, mode="r+", offset=_HEADER_BYTES, shape=(num_blocks,))
        self._read_at = np.memmap(path, np.int64, mode="r+", offset=self._end(num_blocks), shape=(num_blocks,))

    @classmethod
    def num_bytes(cls, num_blocks: int) -> int:
        """Bytes of the counts of so many blocks."""
        return cls._end(num_blocks) + 8 * num_blocks

    @classmethod
    def prepare(cls, folder: Path, num_blocks: int) -> None:
        (folder / _FILE).write_bytes(bytes(cls.num_bytes(num_blocks)))

    def count(self, block: int) -> float:
        """Count a read of a block; returns its score before."""
        now = int(self._clock[0]) + 1
        before = float(self._aged(np.array([block]), now)[0])
        self._scores[block], self._read_at[block], self._clock[0] = before + 1.0, now, now
        return before

    def scores(self, blocks: np.ndarray) -> np.ndarray:
        """The scores of blocks [N], float64 [N]."""
        return self._aged(blocks, int(self._clock[0]))

    def _aged(self, blocks: np.ndarray, now: int) -> np.ndarray:
        ages = np.maximum(now - self._read_at[blocks], 0)
        return self._scores[blocks] * np.exp2(-ages / self._half_life)

    @staticmethod
    def _end(num_blocks: int) -> int:
        """Where the scores end, at a multiple of 8 bytes."""
        return _HEADER_BYTES + -(-4 * num_blocks // 8) * 8
