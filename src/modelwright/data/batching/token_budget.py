"""Rows of variable length to batches of nearly equal numbers of tokens, padding included."""

import numpy as np

LENGTH_MULTIPLE = 8
"""Rows of a batch are padded to a multiple of this, for matrix units and sequence parallelism."""


def padded_len(length: int, longest: int) -> int:
    """Tokens of the rows of a batch whose longest row has `length` tokens; at most `longest`."""
    return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)


def cut(lengths: np.ndarray, budget: int, longest: int) -> np.ndarray:
    """Ends [num_batches] int64 of batches of consecutive rows: as many rows each as fit into `budget` tokens, at least
    one. lengths: tokens of the rows, descending [N].
    """
    ends: list[int] = []
    start = 0
    while start < len(lengths):
        # Not rounded to a multiple of 8 rows, as in fairseq: that leaves up to 7 of 15 rows of a batch empty.
        num_rows = max(1, budget // padded_len(int(lengths[start]), longest))
        start = min(start + num_rows, len(lengths))
        ends.append(start)
    return np.array(ends, dtype=np.int64)


def cut_evenly(lengths: np.ndarray, budget: int, longest: int) -> np.ndarray:
    """`cut`, but where batches have many rows with nearly equal numbers of tokens in all of them, padding not counted,
    instead of a small rest in the last one; at most one batch more.
    """
    greedy = cut(lengths, budget, longest)
    for num_batches in (len(greedy), len(greedy) + 1):
        ends = _cut_into(num_batches, lengths, budget, longest)
        if len(ends) <= num_batches:
            return ends
    return greedy


def _cut_into(num_batches: int, lengths: np.ndarray, budget: int, longest: int) -> np.ndarray:
    """Ends of batches that share the tokens equally; more batches than `num_batches` where the budget requires it."""
    totals = np.cumsum(lengths, dtype=np.int64)
    ends: list[int] = []
    start, done = 0, 0
    while start < len(lengths):
        target = done + (int(totals[-1]) - done) / max(1, num_batches - len(ends))
        num_rows = max(1, budget // padded_len(int(lengths[start]), longest))
        start = min(start + num_rows, int(np.searchsorted(totals, target)) + 1, len(lengths))
        done = int(totals[start - 1])
        ends.append(start)
    return np.array(ends, dtype=np.int64)
