"""Runs one function on many items, in this process or in several, and survives the loss of a process."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from typing import Any, Protocol

from modelwright.core.errors import ModelwrightError

_MOST_BREAKS = 3
_QUEUED_PER_WORKER = 2
_FEWEST_ITEMS = 4
"""With fewer, starting processes takes longer than the work."""


class ShardEngine(Protocol):
    """Where the work on shards is done."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """`function` of each item, as results become available, in any order. Functions and items are pickled."""
        ...


class InProcess:
    """All work in this process."""

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        return map(function, items)


class LocalProcesses:
    """Work in `num_workers` processes of this machine, or in this one where there are few items.

    An item whose process is killed is tried again in a new one. Raises `ModelwrightError` if that happens repeatedly,
    as when the machine has too little memory.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        if self.num_workers == 1 or len(items) < _FEWEST_ITEMS:
            yield from map(function, items)
            return
        left, num_breaks = list(range(len(items))), 0
        while left:
            try:
                for number, result in self._attempt(function, items, left):
                    left.remove(number)
                    yield result
            except BrokenProcessPool:
                num_breaks += 1
                if num_breaks == _MOST_BREAKS:
                    text = f"worker processes were killed {num_breaks} times, perhaps for lack of memory"
                    raise ModelwrightError(f"{text}; use fewer workers and run the same command again") from None

    def _attempt(
        self, function: Callable[[Any], Any], items: Sequence[Any], numbers: Sequence[int]
    ) -> Iterator[tuple[int, Any]]:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of PyTorch hold
        pool = ProcessPoolExecutor(min(self.num_workers, len(numbers)), context, initializer=_follow_parent)
        try:
            queue, running = iter(numbers), dict[Future[Any], int]()
            for number in queue:
                running[pool.submit(function, items[number])] = number
                if len(running) < _QUEUED_PER_WORKER * self.num_workers:
                    continue
                yield from self._collect(running)
            while running:
                yield from self._collect(running)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _collect(self, running: dict[Future[Any], int]) -> list[tuple[int, Any]]:
        done = wait(running, return_when=FIRST_COMPLETED).done
        return [(running.pop(future), future.result()) for future in done]


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and exit when it is gone, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
