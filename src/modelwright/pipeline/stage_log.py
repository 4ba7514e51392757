"""Journal of a stage: `stage.json` (digest, and attempts with their use of resources) and `log.txt`.

`stage.json` is written before the stage's first byte, so that the folder of a killed process shows which settings it
belongs to.
"""

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import STOPPING, ModelwrightError, writing
from modelwright.core.progress import Progress
from modelwright.core.resources import ResourceUse
from modelwright.core.rundir import StageDir, read_attempts

LOG_EVERY_S = 5.0


@dataclass
class Attempt:
    """An attempt at a stage. `state`: running, done, stopped, failed, killed (found still running by the next
    attempt).
    """

    started: str
    ranks: int
    state: str = "running"
    error: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    child_peak_bytes: int = 0


def now() -> str:
    """Returns the current UTC time, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextmanager
def begin_attempt(folder: StageDir, digest: str, ranks: int) -> Iterator[Attempt]:
    """Records the start of an attempt, and at its end the outcome and the resources used (this process, rank 0)."""
    # A process that is killed cannot write its end: an attempt that still counts as running has died.
    before = [entry | {"state": "killed"} if entry["state"] == "running" else entry for entry in read_attempts(folder)]
    attempt = Attempt(started=now(), ranks=ranks)
    _write(folder, digest, [*before, asdict(attempt)])
    use = ResourceUse()
    try:
        with use:
            yield attempt
        attempt.state = "done"
    except STOPPING:
        attempt.state = "stopped"
        raise
    except BaseException as error:
        attempt.state, attempt.error = "failed", str(error)
        raise
    finally:
        attempt.wall_s, attempt.cpu_s, attempt.peak_bytes = use.wall_s, use.cpu_s, use.peak_bytes
        # A full disk must not hide the failure that is being raised.
        with nullcontext() if attempt.state == "done" else suppress(OSError):
            _write(folder, digest, [*before, asdict(attempt)])


class StageLog:
    """A `Progress` that also writes `log.txt`: notes at once, the state of long work every few seconds."""

    def __init__(self, path: Path, shown: Progress, title: str) -> None:
        self._path, self._shown, self._title = path, shown, title
        self._file: IO[str] | None = None
        self._name = ""
        self._unit = ""
        self._total = 0.0
        self._last_line = 0.0

    def __enter__(self) -> "StageLog":
        with writing(self._path):
            self._file = open(self._path, "a", encoding="utf-8")
        self._line(f"{self._title}: begins")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._file is not None
        if error is None:
            self._line(f"{self._title}: done")
        elif isinstance(error, (ModelwrightError, *STOPPING)):
            self._line(f"{self._title}: {type(error).__name__}: {error}", must=False)
        else:
            self._line("".join(traceback.format_exception(error)), must=False)
        self._file.close()

    def begin(self, name: str, total: float, unit: str) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._last_line = time.monotonic()
        self._shown.begin(name, total, unit)

    def advance(self, done: float, **fields: float | str) -> None:
        if time.monotonic() - self._last_line >= LOG_EVERY_S:
            self._last_line = time.monotonic()
            texts = {key: f"{one:.5g}" if isinstance(one, float) else str(one) for key, one in fields.items()}
            shown = " ".join(f"{key}={text}" for key, text in texts.items())
            self._line(f"{self._name}: {done:.0f}/{self._total:.0f} {self._unit} {shown}".rstrip())
        self._shown.advance(done, **fields)

    def note(self, text: str) -> None:
        self._line(text)
        self._shown.note(text)

    def end(self) -> None:
        self._shown.end()

    def _line(self, text: str, *, must: bool = True) -> None:
        assert self._file is not None
        with nullcontext() if must else suppress(OSError), writing(self._path):
            self._file.write(f"{now()} {text}\n")
            self._file.flush()


def _write(folder: StageDir, digest: str, attempts: list[dict[str, Any]]) -> None:
    write_atomic(folder.path / "stage.json", json.dumps({"digest": digest, "attempts": attempts}, indent=1))
