"""What a training writes as JSON lines: metric records, which are passed on to sinks (`core/sinks.py`), with their
summaries, and a log of rare events.

A line is written whole and flushed. On resume the lines past the checkpoint's step are removed, so that a step is
recorded once.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from modelwright.core.artifacts import write_atomic, writing
from modelwright.core.sinks import MetricSink


class Recorder:
    """Appends records to `path` and passes their numbers to `sinks`, which never fail (`QueuedSink`). `first_step`:
    records at or past this step that an earlier process left are removed (it died after its last checkpoint).
    """

    def __init__(self, path: Path, *, sinks: Sequence[MetricSink] = (), first_step: int = 0) -> None:
        self.path = path
        self.sinks = sinks
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written anew, which also drops a last line that a kill has cut off: the next record must begin a line.
            kept = [record for record in read_records(path) if record.get("step", -1) < first_step]
            write_atomic(path, "".join(json_line(record) for record in kept))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the recorder

    def write(self, step: int, **values: float | int | str | bool) -> None:
        """Record `values` at `step`. Numbers that are not finite are written as the strings `nan`, `inf`, `-inf`."""
        with writing(self.path):
            self._file.write(json_line({"step": step, **values}))
            self._file.flush()
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)  # bool is an int
        }
        for sink in self.sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        self._file.close()
        for sink in self.sinks:
            sink.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read all whole records of a metrics file, without a last line truncated by a crash; none if it is missing."""
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def column(records: Iterable[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """`(step, value)` of one metric wherever it was recorded."""
    return [(int(record["step"]), float(record[name])) for record in records if name in record]


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Returns count, mean, standard deviation (of the sample), extremes and percentiles of the finite values.
    Percentiles interpolate linearly between the closest ranks. `nonfinite` counts the values that are left out.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    summary = {"count": float(len(finite)), "nonfinite": float(len(values) - len(finite))}
    if not finite:
        return summary
    mean = math.fsum(finite) / len(finite)
    # Exact sums: naive ones of many values lose digits.
    variance = math.fsum((value - mean) ** 2 for value in finite) / max(1, len(finite) - 1)
    summary |= {"mean": mean, "std": math.sqrt(variance), "min": finite[0], "max": finite[-1]}
    for percent in (1, 5, 25, 50, 75, 95, 99):
        place = percent / 100 * (len(finite) - 1)
        below = math.floor(place)
        above = min(below + 1, len(finite) - 1)
        summary[f"p{percent:02d}"] = finite[below] + (finite[above] - finite[below]) * (place - below)
    return summary


def json_line(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON; numbers that are not finite become the strings `nan`, `inf`, `-inf`."""
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in cast(Mapping[str, Any], value).items()}
    return [_finite(one) for one in cast(Sequence[Any], value)] if isinstance(value, (list, tuple)) else value


MAX_EVENTS = 1000


@dataclass(frozen=True)
class EventKind:
    """Explanation of a kind of event for people; docs/troubleshooting.md lists them all."""

    name: str
    """The observation, as the reader sees it."""
    advice: str
    """Likely cause and remedy; settings and commands in it are shown to the reader as such."""
    is_ordinary: bool = False
    """True if the event is normal in a healthy run."""


class EventLog:
    """Keeps events in memory on every rank and writes them to `path` from the first one on. A kill can truncate the
    last line, which `read_records` ignores and the next process removes. Events past `max_events` are dropped. The file
    of an earlier process is emptied, because the run repeats its events after a checkpoint, which holds those before
    it; with `keep_existing` it is continued instead, for events that are not in checkpoints.
    """

    def __init__(
        self, path: Path, *, is_first: bool = True, max_events: int = MAX_EVENTS, keep_existing: bool = False
    ) -> None:
        self.path = path
        self.is_first = is_first
        self.max_events = max_events
        self.events: list[dict[str, Any]] = read_records(path)[:max_events] if keep_existing else []
        if is_first and path.exists():
            self._rewrite()  # drops a last line that was cut off

    def append(self, **event: Any) -> bool:
        """Add an event, one line; False if the log is full. Non-finite numbers become text."""
        if len(self.events) >= self.max_events:
            return False
        line = json_line(event)
        # Through JSON, so that the events in memory and in checkpoints equal those that are read from the file.
        self.events.append(json.loads(line))
        if self.is_first:
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "ab") as file:
                    file.write(line.encode())  # one write, which a kill can truncate only at a page boundary
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"events": list(self.events)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the events of a checkpoint and rewrite the file accordingly."""
        self.events = list(state["events"])
        if self.is_first and (self.events or self.path.exists()):
            self._rewrite()

    def _rewrite(self) -> None:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, "".join(map(json_line, self.events)))
