"""How long a run takes to recover from a fault: from the last step before it to the first step after it.

The first rank stores the time of its last step in a small file, which the resuming process reads. A run that was
stopped on purpose removes the file.
"""

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from modelwright.core.errors import Stopped, writing
from modelwright.core.event_log import EventLog
from modelwright.parallel.elastic import num_restarts
from modelwright.train.runtime import Runtime
from modelwright.train.technique import StepInfo, Technique

LINE_BYTES = 128
"""Size of the file that every step overwrites in one write, so that no crash leaves half of it."""


class RecoveryTime:
    """Every recovery is one line in `path`.

    A line: step (the first one done or repeated), steps_lost (done before the fault and repeated after it), down_s
    (seconds without a finished step; their mean is the mean time to recover), num_ranks and restart (the launcher's
    restart count). Recoveries of earlier processes are kept.
    """

    def __init__(self, path: Path, *, num_ranks: int, restart: int) -> None:
        self.num_ranks = num_ranks
        self.restart = restart
        self._log = EventLog(path, keep_existing=True)
        self._alive = path.with_name(path.name + ".alive")
        self._before = _read(self._alive)

    def observe(self, info: StepInfo) -> None:
        now = time.time()
        if self._before is not None:
            self._log.append(
                step=info.step,
                steps_lost=max(0, self._before["step"] - info.step + 1),
                down_s=now - self._before["time"],
                num_ranks=self.num_ranks,
                restart=self.restart,
            )
            self._before = None
        alive = json.dumps({"step": info.step, "time": now, "num_ranks": self.num_ranks}).ljust(LINE_BYTES)
        with writing(self._alive):
            file = os.open(self._alive, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, alive.encode(), 0)  # not flushed to disk: that would cost every step
            finally:
                os.close(file)

    def stopped(self) -> None:
        """The run ends on purpose: a later start is not a recovery."""
        self._alive.unlink(missing_ok=True)


def recovery_time(run: Runtime) -> Technique | None:
    """On the first rank only, of a run that is recorded."""
    if run.anomalies is None:
        return None
    recovery = RecoveryTime(run.folder / "recoveries.jsonl", num_ranks=run.world.size, restart=num_restarts())

    def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, Stopped):
            recovery.stopped()

    run.on_exit.push(leave)
    return Technique(name="recovery_time", on_step_end=recovery.observe)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
