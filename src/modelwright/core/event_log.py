"""A log of rare events of a run, as JSON lines, that can be rewound to a checkpoint. Metrics of every step are in
records.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import writing
from modelwright.core.records import json_line, read_records

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
