"""Curves of metrics.jsonl: the file is read once, piece by piece as it grows, and kept as the extremes of at most
`MOST_BUCKETS` intervals of steps, so memory does not depend on its length.
"""

import io
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright_board.files import as_number, open_inside, parse_lines, read_table

MOST_BUCKETS = 512
PIECE_BYTES = 4 << 20
MOST_METRICS = 80
"""Metrics of a file that are kept; a hostile file could name millions."""
MOST_STEP = 2**53
AXES = {"step": "", "tokens": "num_tokens", "seconds": "step_time_s", "flops": "executed_flops"}
"""Axes of curves: steps, or the sum of a metric up to the step."""

Floats = NDArray[np.float64]


@dataclass
class _Curve:
    """Extremes of one metric. Bucket b holds the steps from b * width on; steps, values [buckets, 2]: minimum and
    maximum, NaN in an empty bucket.
    """

    steps: Floats = field(default_factory=lambda: np.full((MOST_BUCKETS, 2), np.nan))
    values: Floats = field(default_factory=lambda: np.full((MOST_BUCKETS, 2), np.nan))

    def halve(self) -> None:
        """Merges pairs of buckets."""
        half = MOST_BUCKETS // 2
        for place, is_better in ((0, np.less_equal), (1, np.greater_equal)):
            first, second = self.values[::2, place], self.values[1::2, place]
            is_first = is_better(first, second) | np.isnan(second)
            self.steps[:half, place] = np.where(is_first, self.steps[::2, place], self.steps[1::2, place])
            self.values[:half, place] = np.where(is_first, first, second)
        self.values[half:] = np.nan

    def add(self, buckets: NDArray[np.int64], steps: Floats, values: Floats) -> None:
        """Adds finite values; buckets must ascend."""
        starts = np.flatnonzero(np.r_[True, buckets[1:] != buckets[:-1]])
        lengths = np.diff(np.r_[starts, len(buckets)])
        touched = buckets[starts]
        for place, extreme, is_better in ((0, np.minimum, np.less), (1, np.maximum, np.greater)):
            best = extreme.reduceat(values, starts)
            # The first place in each bucket that has the bucket's extreme.
            found = np.flatnonzero(values == np.repeat(best, lengths))
            first = found[np.searchsorted(found, starts)]
            old = self.values[touched, place]
            fresh = np.isnan(old) | is_better(best, old)
            self.values[touched[fresh], place] = best[fresh]
            self.steps[touched[fresh], place] = steps[first[fresh]]


class MetricsFile:
    """Curves of one metrics.jsonl. Callers hold `lock`."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage = folder, stage
        self.lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._offset, self._inode, self.size, self.num_broken = 0, 0, 0, 0
        self.width = 1.0
        self._curves: dict[str, _Curve] = {}
        # Sums up to each step: as they grow, the largest of a bucket is that at its last step.
        self._sums = {name: _Curve() for name in AXES.values() if name}
        self.version = time.monotonic_ns()

    @property
    def is_whole(self) -> bool:
        return self._offset >= self.size

    @property
    def share_read(self) -> float:
        return self._offset / self.size if self.size else 1.0

    def read(self, budget_s: float = 0.3) -> None:
        """Reads appended lines for about `budget_s` seconds; the next call reads the rest."""
        until = time.monotonic() + budget_s
        try:
            with open_inside(self.folder, self.stage, "metrics.jsonl") as file:
                info = os.fstat(file.fileno())
                # A resumed run replaces the file by one that ends at its checkpoint.
                if info.st_ino != self._inode or info.st_size < self._offset:
                    self._forget()
                self._inode, self.size = info.st_ino, info.st_size
                file.seek(self._offset)
                while self._offset < self.size:
                    piece = file.read(PIECE_BYTES)
                    end = piece.rfind(b"\n") + 1
                    if not end:
                        if len(piece) < PIECE_BYTES:
                            self.size = self._offset  # a line that is still being written
                            break
                        end, piece = len(piece), b""  # no line of ours is that long
                        self.num_broken += 1
                    self._offset += end
                    self._add(piece[:end])
                    file.seek(self._offset)
                    if time.monotonic() > until:
                        break
        except OSError:
            self._forget()

    def _add(self, piece: bytes) -> None:
        columns = _columns(piece)
        if columns is None:
            records = parse_lines(piece.decode("utf-8", "replace"))
            self.num_broken += piece.count(b"\n") - len(records)
            names = list(dict.fromkeys(key for record in records for key in record))[: 2 * MOST_METRICS]
            columns = {
                name: np.array([as_number(record.get(name)) for record in records], np.float64) for name in names
            }
        steps = columns.pop("step", None)
        if steps is None or not len(steps):
            return
        known = np.isfinite(steps) & (steps >= 0) & (steps < MOST_STEP)
        order = np.flatnonzero(known)
        order = order[np.argsort(steps[order], kind="stable")]
        steps = steps[order]
        if not len(steps):
            return
        while steps[-1] >= self.width * MOST_BUCKETS:
            self._widen()
        buckets = (steps // self.width).astype(np.int64)
        for name, sums in self._sums.items():
            if name in columns:
                amounts = np.clip(np.nan_to_num(columns[name][order], posinf=0.0, neginf=0.0), 0.0, None)
                last = np.nanmax(sums.values[:, 1], initial=0.0)
                sums.add(buckets, steps, last + np.cumsum(amounts))
        for name, column in columns.items():
            values = column[order]
            finite = np.isfinite(values)
            if not finite.any() or (name not in self._curves and len(self._curves) >= MOST_METRICS):
                continue
            curve = self._curves.setdefault(name, _Curve())
            curve.add(buckets[finite], steps[finite], values[finite])

    def _widen(self) -> None:
        self.width *= 2
        self.version = time.monotonic_ns()
        for curve in (*self._curves.values(), *self._sums.values()):
            curve.halve()

    @property
    def names(self) -> list[str]:
        return list(self._curves)

    def points(self, name: str, axis: str = "step", *, since: float = -1.0) -> tuple[list[float], list[float]]:
        """Returns places and values of a metric, with the extremes of each bucket. since: only buckets that end after
        this step.
        """
        curve = self._curves.get(name)
        if curve is None:
            return [], []
        first = max(0, int(since // self.width)) if since >= 0 else 0
        steps, values = curve.steps[first:].reshape(-1), curve.values[first:].reshape(-1)
        known = np.isfinite(values)
        steps, values = steps[known], values[known]
        steps, unique = np.unique(steps, return_index=True)
        values = values[unique]
        if AXES.get(axis):
            sums = self._sums[AXES[axis]]
            known = np.isfinite(sums.values)
            if known.any():  # exact at a bucket's first and last step, linear in between
                steps = np.interp(steps, np.r_[0.0, sums.steps[known]], np.r_[0.0, sums.values[known]])
        return steps.tolist(), [float(f"{value:.6g}") for value in values]

    @property
    def last_step(self) -> float:
        known = [one.steps[np.isfinite(one.values)] for one in self._curves.values()]
        return max((float(one.max()) for one in known if len(one)), default=0.0)


def _columns(piece: bytes) -> dict[str, Floats] | None:
    """Parses JSON lines by columns, ten times as fast as line by line; None if a line is broken, or numbers and texts
    are mixed in one column.
    """
    import pyarrow
    from pyarrow import json as arrow_json

    if piece.count(b"\n") < 50:  # the usual case while a run is watched
        return None
    try:
        # Arrow's own allocator and threads keep 40 MB of what they have freed.
        options = arrow_json.ReadOptions(block_size=1 << 20, use_threads=False)
        pool = pyarrow.system_memory_pool()
        table: Any = arrow_json.read_json(io.BytesIO(piece), read_options=options, memory_pool=pool)
    except (pyarrow.ArrowException, ValueError, KeyError):
        return None
    result: dict[str, Floats] = {}
    for name in table.column_names[: 2 * MOST_METRICS]:
        column = table.column(name)
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
            result[name] = column.cast("float64").to_numpy(zero_copy_only=False)
    return result


HIDDEN = ("num_tokens", "eval_time_s", "checkpoint_stall_s", "peak_flops", "executed_flops", "bytes_sent", "skipped")


def charts_of(names: Sequence[str]) -> list[tuple[dict[str, Any], list[str]]]:
    """Returns the charts of these metrics, each with title, unit and scale: those of charts.yaml first, then one for
    each other metric.
    """
    rest = [name for name in names if name not in HIDDEN]
    result: list[tuple[dict[str, Any], list[str]]] = []
    for title, kind in read_table("charts").items():
        mine = [name for name in rest if any(fnmatchcase(name, one) for one in kind["metrics"])]
        if mine:
            result.append(({"title": title, "unit": kind["unit"], "log": kind.get("is_log", False)}, mine))
            rest = [name for name in rest if name not in mine]
    for name in rest:
        unit = "seconds" if name.endswith("_s") else "value"
        result.append(({"title": name.replace("_", " "), "unit": unit, "log": False}, [name]))
    return result


def curve_message(
    files: Mapping[str, MetricsFile], axis: str, sent: dict[str, tuple[int, float]], *, budget_s: float
) -> dict[str, Any]:
    """Returns the points that the page lacks, and updates `sent` (by run: version, last step sent). files: by
    name of the run. Points from `since` on replace those that the page has.
    """
    charts: list[dict[str, Any]] = []
    unread: list[float] = []
    by_run: dict[str, tuple[MetricsFile, float]] = {}
    for run, file in files.items():
        file.read(budget_s / max(1, len(files)))
        version, last = sent.get(run, (0, -1.0))
        same = version == file.version
        if same and last == file.last_step and file.is_whole:
            continue
        # On other axes every place depends on the sums before it, so the whole curve is sent.
        by_run[run] = (file, last if same and axis == "step" else -1.0)
        sent[run] = (file.version, file.last_step)
        unread += [] if file.is_whole else [file.share_read]
    names = list(dict.fromkeys(name for file, _ in by_run.values() for name in file.names))
    for kind, metrics in charts_of(names):
        traces: list[dict[str, Any]] = []
        for run, (file, since) in by_run.items():
            for name in metrics:
                places, values = file.points(name, axis, since=since)
                if places:
                    start = max(0.0, since // file.width * file.width) if since >= 0 else -1.0
                    traces.append({"run": run, "metric": name, "since": start, "x": places, "y": values})
        if traces:
            charts.append({**kind, "traces": traces})
    return {"charts": charts, "axis": axis, "share": min(unread, default=1.0)} if by_run else {}
