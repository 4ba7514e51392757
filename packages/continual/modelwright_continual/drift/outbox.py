"""The state of a watcher: its position in the file, and alarms that are not delivered yet. It is one small file,
replaced as a whole after each window, so that a process killed at any moment neither loses an alarm nor raises it
twice.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import ArtifactError, make_folder, write_atomic
from modelwright.core.config import ConfigError

_REMEMBERED = 1000
"""Number of delivered alarms whose ids are kept."""


@dataclass
class WatchState:
    """A watcher's state. reference: its digest; file, offset, line: position of the next window; windows: number of
    windows so far; recent: their latest statistics, as in `RecentWindows`; last_alarm: window of each feature's last
    alarm that was reported; pending: messages by the id of their alarm, oldest first; delivered: ids of delivered
    alarms.
    """

    reference: str = ""
    file: str = ""
    offset: int = 0
    line: int = 1
    windows: int = 0
    recent: list[list[float]] = field(default_factory=list[list[float]])
    last_alarm: dict[str, int] = field(default_factory=dict[str, int])
    pending: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    delivered: list[str] = field(default_factory=list[str])


class Outbox:
    """The state in `folder`, which one process at a time can open."""

    def __init__(self, folder: Path) -> None:
        """Opens the state. Raises `ConfigError` if another process watches with this folder, and `ArtifactError` if the
        state is damaged.
        """
        make_folder(folder)
        self.folder, self._path = folder, folder / "state.json"
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            # The kernel releases this lock when the process ends, even by `kill -9`.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"--state: {folder} is in use by another watcher; give each its own folder") from None
        self.state = self._read()

    def _read(self) -> WatchState:
        try:
            return WatchState(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return WatchState()
        except (ValueError, TypeError) as error:
            raise ArtifactError(f"{self._path}: is damaged ({error}); remove it to begin anew") from None

    def save(self) -> None:
        write_atomic(self._path, json.dumps(asdict(self.state), ensure_ascii=False))

    def put(self, key: str, message: Mapping[str, Any]) -> bool:
        """Adds a message unless one with this key is pending or was delivered; `save` makes it permanent."""
        if key in self.state.pending or key in self.state.delivered:
            return False
        self.state.pending[key] = dict(message)
        return True

    def mark_delivered(self, key: str) -> None:
        del self.state.pending[key]
        self.state.delivered = [*self.state.delivered, key][-_REMEMBERED:]
        self.save()

    def close(self) -> None:
        os.close(self._lock)
