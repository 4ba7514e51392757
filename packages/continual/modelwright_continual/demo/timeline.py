"""Times of the demonstration's steps, kept on disk so that a repeated command keeps the time of the first one."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic


@dataclass(frozen=True)
class Timeline:
    """Named moments with their Unix times and figures, in the order in which they happened."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def figures(self, name: str) -> dict[str, Any]:
        """Returns the figures of a recorded moment."""
        return {key: value for key, value in self.read()[name].items() if key != "time"}

    @property
    def span_s(self) -> float:
        """Seconds from the first moment to the last one."""
        times = [float(one["time"]) for one in self.read().values()]
        return max(times) - min(times)

    def mark(self, name: str, **figures: Any) -> float:
        """Records that a moment is now, unless it was recorded before; returns its Unix time."""
        moments = self.read()
        if name not in moments:
            moments[name] = {"time": time.time(), **figures}
            write_atomic(self.path, json.dumps(moments, indent=1))
        return float(moments[name]["time"])
