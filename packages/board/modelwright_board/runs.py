"""Reads the runs below a folder: state, process, stages and last figures of each run."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from modelwright_board.files import (
    as_list,
    as_number,
    as_object,
    flat_settings,
    open_inside,
    parse_lines,
    read_json,
    read_tail,
    read_text,
)

RUN_INFO, STAGE_INFO, LOCK, METRICS = "run.json", "stage.json", ".lock", "metrics.jsonl"
TAIL_BYTES = 8_000
MOST_STAGES = 200

Score = tuple[str, str, float, float, float]
"""Model, measure, low end of its interval, value, high end."""


@dataclass(frozen=True)
class StageState:
    """A stage's folder. state: done, running, waiting, or how its last attempt ended (killed, stopped, failed)."""

    name: str
    state: str
    wall_s: float = 0.0
    peak_bytes: float = 0.0
    num_attempts: int = 0
    error: str = ""
    has_metrics: bool = False


@dataclass(frozen=True)
class Run:
    """A run's folder at the time of reading. state: running, done, stopped, failed, killed or new; pid:
    the process that works in it, 0 without one; words: its last command line; figures: last values of its last
    training.
    """

    name: str
    path: Path
    state: str
    pid: int
    words: Sequence[str]
    started: str
    ended: str
    error: str
    stages: Sequence[StageState]
    figures: dict[str, float] = field(default_factory=dict)
    origin: str = ""

    @property
    def trainings(self) -> list[str]:
        return [stage.name for stage in self.stages if stage.has_metrics]

    def stage(self, name: str) -> StageState | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def has_done(self, *names: str) -> bool:
        return any(stage.state == "done" for stage in self.stages if stage.name in names)

    def json(self, *parts: str) -> dict[str, Any]:
        return read_json(self.path, *parts)

    def scores(self) -> list[Score]:
        """Returns the results of the evaluation, the last model first."""
        return scores_of(as_object(self.json("evaluate", "artifact", "results.json").get("models")))

    def settings(self) -> dict[str, str]:
        return flat_settings(read_text(self.path, "config.yaml", most=1_000_000))

    @property
    def where(self) -> str:
        """The path to the folder for a command line in the working folder."""
        return shown_path(self.path)


def scores_of(models: dict[str, Any]) -> list[Score]:
    """Returns what tables of results, by model, have of each measure; NaN for a missing end of an interval."""
    found: list[Score] = []
    for name, model in reversed(models.items()):
        kinds = as_object(as_object(model).get("bits_per_byte")).items()
        tables = [(f"bits per byte of {kind}", "bits_per_byte", table) for kind, table in kinds]
        tables += [("perplexity of answers", "perplexity", as_object(model).get("answers"))]
        tables += [("multiple choice", "accuracy", as_object(model).get("multiple_choice"))]
        for title, key, table in tables:
            low, value, high = (as_number(as_object(table).get(one)) for one in (f"{key}_low", key, f"{key}_high"))
            if value == value:
                found.append((name, title, low, value, high))
    return found


def shown_path(path: Path) -> str:
    """Returns the path relative to the working folder if it is below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


class Runs:
    """The folders of `root` that are runs. Results are kept until a file that they were read from changes."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._kept: dict[str, tuple[Any, Run]] = {}
        self._seen: tuple[float, list[Run]] = (-1.0, [])

    def names(self) -> list[str]:
        """Names of the runs, those that changed last first."""
        found: list[tuple[float, str]] = []
        try:
            entries = list(os.scandir(self.root))
        except OSError:
            return []
        for entry in entries:
            try:
                # A link may lead anywhere, so it is no run; nor is a folder in which nothing has begun.
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                found.append((os.stat(f"{entry.path}/{RUN_INFO}", follow_symlinks=False).st_mtime, entry.name))
            except OSError:
                continue
        return [name for _, name in sorted(found, reverse=True)]

    def all(self) -> list[Run]:
        """Returns the runs, those that changed last first. One look serves all parts of a page."""
        seen_at, runs = self._seen
        if time.monotonic() - seen_at > 0.5:
            held = holders()
            runs = [run for name in self.names() if (run := self._read(name, held))]
            self._seen = (time.monotonic(), runs)
        return runs

    def get(self, name: str) -> Run | None:
        """Returns the run of this name; None for any other name."""
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            return None
        folder = self.root / name
        return None if folder.is_symlink() or not folder.is_dir() else self._read(name, holders())

    def _read(self, name: str, held: dict[int, int]) -> Run | None:
        folder = self.root / name
        pid = _holder(folder, held)
        seen: list[Any] = [pid, changed(f"{folder}/{RUN_INFO}")]
        try:
            folders = (entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
            stages = list(islice(folders, MOST_STAGES))
        except OSError:
            return None
        seen += [
            (stage, file, changed(f"{folder}/{stage}/{file}")) for stage in stages for file in (STAGE_INFO, METRICS)
        ]
        key = tuple(sorted(map(repr, seen)))
        if name in self._kept and self._kept[name][0] == key:
            return self._kept[name][1]
        run = _read_run(folder, pid, stages)
        self._kept[name] = (key, run)
        return run


def changed(path: str | Path) -> tuple[int, int]:
    """Returns time and size of a file, zeros without one."""
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError:
        return (0, 0)
    return (info.st_mtime_ns, info.st_size)


def _read_run(folder: Path, pid: int, names: Sequence[str]) -> Run:
    info = read_json(folder, RUN_INFO)
    last = as_object((as_list(info.get("invocations")) or [{}])[-1])
    finished = as_object(info.get("stages"))
    found: list[tuple[str, StageState]] = []
    for name in names:
        attempts = [as_object(one) for one in as_list(read_json(folder / name, STAGE_INFO).get("attempts"))]
        if not attempts:
            continue
        state = str(attempts[-1].get("state", ""))
        if state == "running" and not pid:
            state = "killed"
        wall_s = sum(value for one in attempts if (value := as_number(one.get("wall_s"))) == value)
        peak = max((value for one in attempts if (value := as_number(one.get("peak_bytes"))) == value), default=0.0)
        has_metrics = changed(folder / name / METRICS)[1] > 0
        error = str(attempts[-1].get("error") or "")[:2000]
        order = str(attempts[0].get("started", ""))
        found.append((order, StageState(name, state, wall_s, peak, len(attempts), error, has_metrics)))
    # Stages that finished within one second keep the order in which run.json has them.
    ranks = {name: place for place, name in enumerate(finished)}
    stages = [one for _, one in sorted(found, key=lambda pair: (pair[0], ranks.get(pair[1].name, len(ranks))))]
    state = str(last.get("state", "new"))
    if pid:
        state = "running"
    elif state == "running":
        state = "killed"
    figures: dict[str, float] = {}
    for stage in [one for one in stages if one.has_metrics][-1:]:
        for record in parse_lines(read_tail(folder / stage.name, METRICS, most=TAIL_BYTES)):
            figures |= {key: as_number(value) for key, value in record.items() if key in _FIGURES}
    return Run(
        name=folder.name, path=folder, state=state if re.fullmatch("[a-z]{1,12}", state) else "new", pid=pid,
        words=[str(word)[:1000] for word in as_list(last.get("command"))[:200]],
        started=str(last.get("started", ""))[:40], ended=str(last.get("ended", ""))[:40],
        error=str(last.get("error") or "")[:2000], stages=stages, figures=figures,
        origin=str(last.get("origin", ""))[:200],
    )  # fmt: skip


_FIGURES = ("step", "loss", "heldout_loss", "tokens_per_s", "reward")


def holders() -> dict[int, int]:
    """Returns the processes that hold a lock of the kind that runs use, by inode. Empty on systems without
    /proc/locks. The lock itself is not tried: for a moment, that would keep a run from starting.
    """
    result: dict[int, int] = {}
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return result
    for line in lines:
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5].count(":") == 2:
            result[int(words[5].rpartition(":")[2])] = int(words[4])
    return result


def _holder(folder: Path, held: dict[int, int]) -> int:
    """Returns the process that works in the run, 0 if none does."""
    try:
        with open_inside(folder, LOCK) as file:
            inode, text = os.fstat(file.fileno()).st_ino, file.read(20).decode("ascii", "replace").strip()
    except OSError:
        return 0
    # The file names its holder, but anyone can write a number into a file: only the kernel says who holds the lock.
    if not text.isdigit():
        return 0
    if Path("/proc/locks").exists():
        return int(text) if held.get(inode) == int(text) else 0
    try:
        os.kill(int(text), 0)
    except (OSError, OverflowError):
        return 0
    return int(text)
