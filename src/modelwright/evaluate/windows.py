"""Splits long sequences into overlapping windows and packs windows into rows. Integer arithmetic only.

A sequence of n + 1 tokens has n predictions; prediction i is of token i + 1 from the tokens up to i.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from modelwright.data.rows.pack import best_fit


@dataclass(frozen=True)
class Window:
    """Predictions [start, end) of sequence `sequence` run through the model; those from `scored_from` on count."""

    sequence: int
    start: int
    end: int
    scored_from: int

    @property
    def length(self) -> int:
        return self.end - self.start


def cut_windows(sequence: int, num_predictions: int, first: int, *, context: int, stride: int) -> Iterator[Window]:
    """Windows of at most `context` tokens in which each prediction from `first` on counts exactly once.

    A prediction sees all tokens before it as far as `context` reaches in the first window, and at least
    `context - stride` of them in every later one. `1 <= stride <= context`.
    """
    assert 1 <= stride <= context, (stride, context)
    done = first
    while done < num_predictions:
        end = min(num_predictions, max(context, done + stride))
        yield Window(sequence, max(0, end - context), end, done)
        done = end


def pack_windows(windows: Sequence[Window], row_len: int) -> list[list[Window]]:
    """Rows of windows whose lengths sum to at most `row_len`: best fit, longest first.

    Deterministic; fuller rows come first, so that rows of like fill share a batch.
    """
    ordered = sorted(windows, key=lambda w: (-w.length, w.sequence, w.start))
    row_of = best_fit(np.array([window.length for window in ordered], dtype=np.int64), row_len).tolist()
    rows: list[list[Window]] = [[] for _ in range(max(row_of, default=-1) + 1)]
    for window, row in zip(ordered, row_of, strict=True):
        rows[row].append(window)
    return sorted(rows, key=lambda row: -sum(window.length for window in row))
