"""When the steps of the demonstration happened; kept on disk, so that a repeated command knows the first time."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic


@dataclass(frozen=True)
class Timeline:
    """Names of moments with their Unix times and figures, in the order in which they came."""

    path: Path

    def read(self) -> dict[str, dict[str, Any]]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def figures(self, name: str) -> dict[str, Any]:
        """The figures of a moment that was marked."""
        return {key: value for key, value in self.read()[name].items() if key != "time"}

    @property
    def span_s(self) -> float:
        """Seconds from the first moment to the last one."""
        times = [float(one["time"]) for one in self.read().values()]
        return max(times) - min(times)

    def mark(self, name: str, **figures: Any) -> float:
        """Record that it happens now, unless it happened before; returns when that was."""
        moments = self.read()
        if name not in moments:
            moments[name] = {"time": time.time(), **figures}
            write_atomic(self.path, json.dumps(moments, indent=1))
        return float(moments[name]["time"])
