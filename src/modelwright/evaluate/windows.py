"""Long sequences cut into overlapping windows, windows packed into rows. Pure integers: knows no model.

A sequence of n + 1 tokens has n predictions; prediction i is of token i + 1 from the tokens up to i.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
    """Rows of windows whose lengths sum to at most `row_len`: best fit, longest first (Johnson 1973).

    Deterministic; fuller rows come first, so that rows of like fill share a batch.
    """
    rows: list[list[Window]] = []
    by_space: dict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []
    for window in sorted(windows, key=lambda w: (-w.length, w.sequence, w.start)):
        place = bisect.bisect_left(spaces, window.length)
        if place == len(spaces):
            row, space = len(rows), row_len
            rows.append([])
        else:
            space = spaces[place]
            row = by_space[space].pop()
            if not by_space[space]:
                spaces.pop(place)
        rows[row].append(window)
        left = space - window.length
        if not by_space[left]:
            bisect.insort(spaces, left)
        by_space[left].append(row)
    return sorted(rows, key=lambda row: -sum(window.length for window in row))
