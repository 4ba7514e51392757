"""Writes to a database from a thread of its own, behind a bounded queue: the event loop never waits for a disk."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from modelwright.serve.database import Database

log = logging.getLogger("modelwright.serve")

T = TypeVar("T")
Task = Callable[[Database], T]
"""Reads and writes inside a transaction. It may be called a second time, after a transaction that was rolled back."""

QUEUE_TASKS = 4096
BATCH_TASKS = 128
"""Tasks that share a transaction."""

HOUSEKEEPING_PERIOD_S = 3600.0


class WriterBusy(Exception):
    """The queue is full."""


@dataclass
class _Queued:
    task: Task[Any]
    then: Callable[[Any], None] = lambda result: None
    result: "Future[Any]" = field(default_factory=Future)


class DatabaseWriter:
    """Runs tasks in the order in which they came. The database belongs to its thread from `start` on.

    dropped: is told from any thread why how many tasks were lost ("queue_full", "failed"). housekeeping: run at the
    start and every hour.
    """

    def __init__(
        self, name: str, database: Database, *, dropped: Callable[[str, int], None], housekeeping: Task[None]
    ) -> None:
        self._name = name
        self._database = database
        self._dropped = dropped
        self._housekeeping = housekeeping
        self._queue: queue.Queue[_Queued | None] = queue.Queue(QUEUE_TASKS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, task: Task[T], then: Callable[[T], None] = lambda result: None) -> bool:
        """Run a task some time; false, and counted as dropped, if the queue is full. Never waits. then: gets the result
        once it is committed, in the writer's thread.
        """
        try:
            self._queue.put_nowait(_Queued(task, then))
        except queue.Full:
            self._dropped("queue_full", 1)
            return False
        return True

    async def call(self, task: Task[T]) -> T:
        """The result of a task, once it is committed. Raises `WriterBusy`, and what the task raises."""
        entry = _Queued(task)
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            raise WriterBusy from None
        # a caller who is canceled must not cancel the future, which the writer's thread is going to set
        return await asyncio.shield(asyncio.wrap_future(entry.result))

    def close(self) -> None:
        """Finish what is in the queue and close the database. Waits."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open, due = True, time.monotonic()
        while is_open:
            entries: list[_Queued | None] = []
            if time.monotonic() >= due:
                entries.append(_Queued(self._housekeeping))
                due = time.monotonic() + HOUSEKEEPING_PERIOD_S
            else:
                with contextlib.suppress(queue.Empty):
                    entries.append(self._queue.get(timeout=max(0.0, due - time.monotonic())))
            while len(entries) < BATCH_TASKS and not self._queue.empty():
                entries.append(self._queue.get())
            is_open = None not in entries
            self._run_tasks([entry for entry in entries if entry is not None])
        self._database.close()

    def _run_tasks(self, entries: Sequence[_Queued]) -> None:
        """All in one transaction; if one fails, each in its own, so that it takes no other along."""
        try:
            results = self._in_transaction(entries)
        except Exception as error:
            if len(entries) > 1:
                for entry in entries:
                    self._run_tasks([entry])
            elif entries:
                self._failed(entries[0], error)
            return
        for entry, result in zip(entries, results, strict=True):
            entry.result.set_result(result)
            entry.then(result)

    def _in_transaction(self, entries: Sequence[_Queued]) -> list[Any]:
        with self._database.transaction():
            return [entry.task(self._database) for entry in entries]

    def _failed(self, entry: _Queued, error: Exception) -> None:
        """The error's text is not logged: it may repeat what was to be written."""
        self._dropped("failed", 1)
        log.error("%s: could not be written (%s)", self._name, type(error.__cause__ or error).__name__)
        entry.result.set_exception(error)
