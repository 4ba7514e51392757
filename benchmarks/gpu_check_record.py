"""What `gpu_check.py` runs, in which order, and its record, which is written after every case.

A part is a set of named cases. Parts without a record come first, then parts with unmeasured cases; within a part,
cases without a record come first. Each part ends before its time is over: no case starts that would not fit, judged by
the longest case of that part so far. A run that is cut off loses the case that it was in and nothing else.
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic

Case = Callable[[], Mapping[str, Any]]
"""Measures one thing and returns its figures."""
Part = Mapping[str, Case]
HIDDEN = frozenset({"machine", "threads", "load_at_start", "versions"})
"""Circumstances that a table leaves out: they are the same in all of its lines."""


@dataclass(kw_only=True)
class Record:
    """Figures of one card by part and case. around: circumstances, which stand next to each figure."""

    path: Path
    around: Mapping[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.parts = json.loads(self.path.read_text(encoding="utf-8")).get("parts", {})

    def add(self, part: str, case: str, figures: Mapping[str, Any]) -> None:
        """Writes the figures of a case at once."""
        self.parts.setdefault(part, {})[case] = {**figures, **self.around}
        write_atomic(
            self.path, json.dumps({"benchmark": "gpu-check", "parts": self.parts}, indent=1, default=float) + "\n"
        )

    def has(self, part: str, case: str) -> bool:
        """Whether the case has figures; one that failed does not."""
        return "error" not in self.parts.get(part, {}).get(case, {"error": ""})


def in_order(parts: Mapping[str, Part], record: Record) -> list[str]:
    """Parts without any figure first, then those that lack some, then the rest; each in the order of `parts`."""

    def share(name: str) -> float:
        return sum(record.has(name, case) for case in parts[name]) / max(1, len(parts[name]))

    return sorted(parts, key=share)


def run_part(
    name: str, part: Part, record: Record, *, limit_s: float, again: bool, clock: Callable[[], float] = time.monotonic
) -> list[str]:
    """Runs the cases of a part that fit into `limit_s`. again: also those that have a record. Returns the errors."""
    started, longest_s, errors = clock(), 0.0, list[str]()
    for case in sorted(part, key=lambda case: record.has(name, case)):
        if record.has(name, case) and not again:
            continue
        if clock() - started + longest_s > limit_s:
            print(f"gpu-check: {name}/{case} does not fit into {limit_s:.0f} s; run again for it", flush=True)
            break
        before = clock()
        try:
            figures = dict(part[case]())
        except Exception as error:
            traceback.print_exc()
            figures = {"error": repr(error)}
        if error := figures.get("error"):
            errors.append(f"{name}/{case}: {error}")
        took_s = clock() - before
        longest_s = max(longest_s, took_s)
        record.add(name, case, {**figures, "case_s": round(took_s, 1)})
        print(f"gpu-check: {name}/{case}: {figures}", flush=True)
    return errors


def table(record: Record) -> str:
    """The record as Markdown: a table for each part."""
    lines: list[str] = []
    for name, cases in record.parts.items():
        shown = {case: {k: v for k, v in figures.items() if k not in HIDDEN} for case, figures in cases.items()}
        keys = list(dict.fromkeys(key for figures in shown.values() for key in figures))
        lines += [f"#### {name}", "", f"| | {' | '.join(keys)} |", f"| --- |{' --- |' * len(keys)}"]
        for case, figures in shown.items():
            values = " | ".join(_shown(figures.get(key, "")) for key in keys)
            lines.append(f"| {case} | {values} |")
        lines.append("")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
