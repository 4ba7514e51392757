"""Rows by their blocks, read by threads, before they are needed where the order is known."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from modelwright.data.cache.tiers import TierFigures, Tiers

Row = tuple[np.ndarray, np.ndarray | None]
"""Tokens [seq_len], and the loss mask [seq_len] where the rows have one."""


@dataclass
class ReadFigures:
    """What this process asked for: rows, those of them that were there already, and seconds that their batches were
    waited for.
    """

    num_rows: int = 0
    num_ready: int = 0
    wait_s: float = 0.0


class BlockReader:
    """`RowReader` of packed rows. num_readers: reads at a time."""

    def __init__(self, tiers: Tiers, *, num_readers: int) -> None:
        self.figures = ReadFigures()
        self.tiers = tiers
        self._threads = ThreadPoolExecutor(num_readers, thread_name_prefix="rows")
        self.background = ThreadPoolExecutor(1, thread_name_prefix="batches")
        """Where batches are assembled before they are needed, until the reader is closed."""
        self._rows: dict[int, Future[dict[int, Row]]] = {}
        """Rows that are expected. Replaced, never changed in place, so that another thread may look into it."""

    @property
    def tier_figures(self) -> TierFigures:
        return self.tiers.figures

    def expect(self, rows: Iterable[int]) -> None:
        """Read these rows, the first ones first, and forget what was expected before and is not among them."""
        wanted = dict.fromkeys(rows)
        kept = {row: future for row, future in self._rows.items() if row in wanted}
        useful = set(map(id, kept.values()))  # rows of a block share a future
        for future in self._rows.values():
            if id(future) not in useful:
                future.cancel()
        self._rows = kept | self._start([row for row in wanted if row not in kept])

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens of rows [N] and their loss mask, both [N, seq_len]. Raises what `Tiers.read` does."""
        with self.waiting_for(rows):
            return self.fetch(rows)

    @contextmanager
    def waiting_for(self, rows: np.ndarray) -> Iterator[None]:
        """Count rows [N] that training asks for, and how long it waits for them."""
        numbers, expected = rows.tolist(), self._rows
        self.figures.num_rows += len(numbers)
        self.figures.num_ready += sum(row in expected and expected[row].done() for row in numbers)
        started = time.perf_counter()
        yield
        self.figures.wait_s += time.perf_counter() - started

    def fetch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """What `read` returns, in no figure. May be called while another thread calls `expect`; if that forgets one of
        these rows before its read has begun, raises what the result of a canceled future does.
        """
        numbers, expected = rows.tolist(), self._rows
        futures = {row: expected[row] for row in numbers if row in expected}
        futures |= self._start([row for row in dict.fromkeys(numbers) if row not in futures])
        found = [futures[row].result()[row] for row in numbers]
        masks = [mask for _, mask in found if mask is not None]
        return np.stack([tokens for tokens, _ in found]), np.stack(masks) if masks else None

    def close(self) -> None:
        """Wait for the reads that have begun and forget the others, and the batch that needs them."""
        self._threads.shutdown(cancel_futures=True)
        self.background.shutdown(cancel_futures=True)
        self.tiers.close()

    def _start(self, rows: Iterable[int]) -> dict[int, Future[dict[int, Row]]]:
        by_block: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            by_block[self.tiers.layout.block_of(row)[0]].append(row)
        futures: dict[int, Future[dict[int, Row]]] = {}
        for block, members in by_block.items():
            futures |= dict.fromkeys(members, self._threads.submit(self._take, block, members))
        return futures

    def _take(self, block: int, rows: list[int]) -> dict[int, Row]:
        """Copies of some rows of a block, so that its content is not kept."""
        tokens, masks = self.tiers.layout.rows(block, self.tiers.read(block))
        places = {row: self.tiers.layout.block_of(row)[1] for row in rows}
        return {
            row: (tokens[place].copy(), None if masks is None else masks[place].copy()) for row, place in places.items()
        }
