"""Records interruptions of a run with the time to recover: from the last step before one to the first step after it.

The first rank stores the time of its last step in a small file, which the resuming process reads. A run that ends, or
that a person stops with Ctrl-C, removes the file. A cloud announces by SIGTERM that it reclaims an instance, so a run
that is stopped by it marks the file.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from modelwright.core.artifacts import writing
from modelwright.core.config import Stopped
from modelwright.core.records import EventLog
from modelwright.parallel.elastic import num_restarts
from modelwright.train.technique import Runtime, StepInfo, Technique

FAULT, ANNOUNCED = "fault", "announced"
"""Kinds of interruptions: without warning, and by SIGTERM, after which a checkpoint was saved."""
RECOVERIES_FILE = "recoveries.jsonl"
LINE_BYTES = 128
"""Size of the file that every step overwrites in one write, so that no crash leaves half of it."""


class RecoveryTime:
    """Every recovery is one line in `path`.

    A line: kind (`FAULT` or `ANNOUNCED`), step (the first one done or repeated), steps_lost (done before the
    interruption and repeated after it), down_s (seconds without a finished step; the mean of faults is the mean time to
    recover), num_ranks and restart (the launcher's restart count). Recoveries of earlier processes are kept.
    """

    def __init__(self, path: Path, *, num_ranks: int, restart: int) -> None:
        self.num_ranks = num_ranks
        self.restart = restart
        self._log = EventLog(path, keep_existing=True)
        self._alive = path.with_name(path.name + ".alive")
        self._before: dict[str, Any] | None = None
        with suppress(OSError, ValueError):
            self._before = json.loads(self._alive.read_text(encoding="utf-8"))
        self._last: dict[str, Any] | None = None

    def observe(self, info: StepInfo) -> None:
        now = time.time()  # not monotonic: it is compared with the time of another process
        if self._before is not None:
            self._log.append(
                kind=self._before.get("kind", FAULT),
                step=info.step,
                steps_lost=max(0, self._before["step"] - info.step + 1),
                down_s=now - self._before["time"],
                num_ranks=self.num_ranks,
                restart=self.restart,
            )
            self._before = None
        self._last = {"step": info.step, "time": now, "kind": FAULT}
        self._write(self._last)

    def stopped(self) -> None:
        """The run ends on purpose: a later start is not a recovery."""
        self._alive.unlink(missing_ok=True)

    def announced(self) -> None:
        """The run ends because it was told that its instance goes: a later start recovers from that."""
        if self._last is not None:
            self._write({**self._last, "kind": ANNOUNCED})

    def _write(self, last: dict[str, Any]) -> None:
        with writing(self._alive):
            file = os.open(self._alive, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                line = json.dumps(last).ljust(LINE_BYTES)
                os.pwrite(file, line.encode(), 0)  # not flushed to disk: that would cost every step
            finally:
                os.close(file)


def recovery_time(run: Runtime) -> Technique | None:
    """Returns None on all ranks but the first, and for a step that is only traced."""
    if run.log_event is None:
        return None
    recovery = RecoveryTime(run.folder / RECOVERIES_FILE, num_ranks=run.world.size, restart=num_restarts())

    def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Stopped) and error.exit_code == Stopped.exit_code:
            with suppress(OSError):  # it must not hide why the run ends
                recovery.announced()
        elif error is None or isinstance(error, Stopped):
            recovery.stopped()

    run.on_exit.push(leave)
    return Technique(name="recovery_time", on_step_end=recovery.observe, needs=frozenset())
