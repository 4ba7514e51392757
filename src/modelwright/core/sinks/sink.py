"""`MetricSink`: takes the numbers of a training to a tracker. Each sink runs in its own thread, so that no training
waits for a sink or ends with it.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from modelwright.core.config import flatten
from modelwright.core.redact import redact_text


@dataclass(frozen=True, kw_only=True)
class SinkStart:
    """Facts about a training for a sink. A process that resumes a training opens its sinks anew. run, name: names of
    the run and of the stage; folder: of the stage, for local files; first_step: first step of this process; settings:
    flat, without secrets.
    """

    run: str
    name: str
    folder: Path
    first_step: int = 0
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


class MetricSink(Protocol):
    """An open sink. It may fail and be slow: `QueuedSink` keeps that from the training."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step; they may be infinite or NaN."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """A kind of sink. package: the package that it imports; extra: the extra of this project that installs it; "" for
    none.
    """

    name: str
    open: Callable[[SinkStart], MetricSink]
    package: str = ""
    extra: str = ""


def flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings by dotted names, each value as text."""
    return {name: str(value) for name, value in flatten(settings)}


MAX_WAITING = 10_000
"""Records in the queue of a slow sink; further ones are left out and counted."""
CLOSE_TIMEOUT_S = 30.0
"""Longest time that the end of a training waits for a sink to take the rest of its records."""
_Record = tuple[int, Mapping[str, float]]


class QueuedSink:
    """Opens, fills and closes a sink in a thread. An exception of the sink becomes one note, after which it gets no
    more records; records that it would not take in time are counted. Notes are shown by the thread that trains.
    """

    def __init__(self, spec: SinkSpec, start: SinkStart, note: Callable[[str], None]) -> None:
        self._spec, self._start, self._note = spec, start, note
        self._waiting: queue.Queue[_Record | None] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0
        self._failure, self._is_told = "", False
        # A daemon, so that a sink that never returns cannot keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"sink {spec.name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._has_failed():
            return
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Wait for the rest of the records, at most `CLOSE_TIMEOUT_S`."""
        with contextlib.suppress(queue.Full):
            # One deadline for both waits: for room in the queue, and for the thread.
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._has_failed():
            return
        if self._thread.is_alive():
            self._note(f"{self._spec.name}: does not answer; metrics.jsonl has what it lacks")
        elif self._num_dropped:
            self._note(f"{self._spec.name}: was too slow for {self._num_dropped:,} records; metrics.jsonl has them")

    def _has_failed(self) -> bool:
        if self._failure and not self._is_told:
            self._is_told = True
            self._note(f"{self._spec.name}: failed and gets nothing more ({self._failure}); metrics.jsonl has it all")
        return bool(self._failure)

    def _work(self) -> None:
        try:
            sink = self._spec.open(self._start)
            while (record := self._waiting.get()) is not None:
                sink.write(*record)
            sink.close()
        except Exception as error:  # whatever a foreign library raises: a training is worth more than its picture
            first_line = str(error).partition("\n")[0]
            self._failure = f"{type(error).__name__}: {redact_text(first_line)}"  # some name a URL with its password
            while not self._waiting.empty():  # so that `close` finds room for its mark
                self._waiting.get_nowait()
