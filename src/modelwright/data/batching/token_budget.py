"""Rows of variable length to batches of at most so many tokens, padding included."""

import numpy as np

LENGTH_MULTIPLE = 8
"""Rows of a batch are padded to a multiple of this, for matrix units and sequence parallelism."""


def padded_len(length: int, longest: int) -> int:
    """Tokens of the rows of a batch whose longest row has `length` tokens; at most `longest`."""
    return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)


def cut(lengths: np.ndarray, budget: int, longest: int) -> np.ndarray:
    """Ends [num_batches] int64 of batches of consecutive rows: as many rows each as fit into `budget` tokens, at least
    one. lengths: tokens of the rows, descending [N]. The last batch may be small; a step divides by its own tokens.
    """
    ends: list[int] = []
    start = 0
    while start < len(lengths):
        # Not rounded to a multiple of 8 rows, as in fairseq: that leaves up to 7 of 15 rows of a batch empty.
        num_rows = max(1, budget // padded_len(int(lengths[start]), longest))
        start = min(start + num_rows, len(lengths))
        ends.append(start)
    return np.array(ends, dtype=np.int64)
