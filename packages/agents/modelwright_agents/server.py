"""The tools of the server: each reads a part of one run and returns plain data."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcp.server.fastmcp import FastMCP
from mcp.types import ToolAnnotations

from modelwright.core.artifacts import ArtifactError, RunDir, read_attempts, read_manifest
from modelwright.core.config import ModelwrightError
from modelwright.core.records import column, read_records

MAX_CHARACTERS = 20_000
"""Most characters of a text in a reply; a longer one is cut, and says so."""
MAX_POINTS = 200
"""Most points of a curve in a reply."""
MAX_SAMPLES = 6


class RunFolder:
    """A folder of runs, or one run. Names of runs and stages are names of folders inside it, never paths."""

    def __init__(self, folder: Path) -> None:
        self._root = folder.resolve()

    def runs(self) -> dict[str, RunDir]:
        """Returns all runs by name: folders with a `run.json`."""
        if (self._root / "run.json").is_file():
            return {self._root.name: RunDir(self._root)}
        folders = sorted(path for path in self._root.iterdir() if (path / "run.json").is_file())
        # a link could lead anywhere
        return {path.name: RunDir(path) for path in folders if not path.is_symlink()}

    def run(self, name: str) -> RunDir:
        """Returns a run. Raises `ValueError` that names the known ones."""
        known = self.runs()
        if name not in known:
            raise ValueError(f"run {name!r} does not exist; known runs: {', '.join(known) or 'none'}")
        return known[name]

    def stages(self, run: RunDir) -> list[str]:
        """Returns the stages that have been started, oldest first."""
        found = [path for path in run.path.iterdir() if (path / "stage.json").is_file() and not path.is_symlink()]
        return [path.name for path in sorted(found, key=lambda path: (path / "stage.json").stat().st_ctime_ns)]

    def stage(self, run: str, stage: str) -> Path:
        """Returns the folder of a stage. Raises `ValueError`."""
        known = self.stages(self.run(run))
        if stage not in known:
            raise ValueError(
                f"stage {stage!r} of run {run!r} does not exist; known stages: {', '.join(known) or 'none'}"
            )
        return self.run(run).stage(stage).path

    def list_runs(self) -> list[dict[str, Any]]:
        """Lists the runs with their stages, and whether each stage has finished."""
        return [
            {"run": name, "stages": [self._state(run, stage) for stage in self.stages(run)]}
            for name, run in self.runs().items()
        ]

    def _state(self, run: RunDir, stage: str) -> dict[str, Any]:
        folder = run.stage(stage)
        attempts = read_attempts(folder)
        return {"stage": stage, "state": attempts[-1]["state"] if attempts else "unknown", "attempts": len(attempts)}

    def read_settings(self, run: str) -> str:
        """Returns the resolved settings of a run (config.yaml)."""
        try:
            return shortened(self.run(run).config.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise ValueError(f"the settings of {run!r} cannot be read ({error.strerror})") from None

    def list_metrics(self, run: str, stage: str) -> dict[str, Any]:
        """Lists the metrics of a stage with the first, last and smallest value of each."""
        records = read_records(self.stage(run, stage) / "metrics.jsonl")
        names = dict.fromkeys(name for record in records for name, value in record.items() if _is_number(value))
        summary: dict[str, Any] = {}
        for name in names:
            if name == "step" or not (points := self._points(records, name)):
                continue
            values = [value for _, value in points]
            summary[name] = {"points": len(values), "first": values[0], "last": values[-1], "smallest": min(values)}
        return summary

    def read_metric(self, run: str, stage: str, metric: str) -> list[tuple[int, float]]:
        """Returns a metric of a stage as pairs of step and value, thinned out evenly to 200 pairs at most."""
        points = self._points(read_records(self.stage(run, stage) / "metrics.jsonl"), metric)
        if not points:
            known = ", ".join(self.list_metrics(run, stage)) or "none"
            raise ValueError(f"metric {metric!r} of stage {stage!r} does not exist; known metrics: {known}")
        if len(points) <= MAX_POINTS:
            return points
        return [points[round(place * (len(points) - 1) / (MAX_POINTS - 1))] for place in range(MAX_POINTS)]

    def _points(self, records: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
        usable = [one for one in records if _is_number(one.get(name)) and isinstance(one.get("step"), int)]
        return [point for point in column(usable, name) if math.isfinite(point[1])]

    def read_samples(self, run: str, stage: str) -> list[dict[str, Any]]:
        """Returns texts that the model wrote while the stage trained it, from first to last; six at most."""
        records = read_records(self.stage(run, stage) / "samples.jsonl")
        last = len(records) - 1
        places = sorted({round(place * last / (MAX_SAMPLES - 1)) for place in range(MAX_SAMPLES)}) if records else []
        return [
            {name: shortened(value) if isinstance(value, str) else value for name, value in records[place].items()}
            for place in places
        ]

    def read_figures(self, run: str, stage: str) -> dict[str, Any]:
        """Returns the figures of a finished stage, as its report has them: counts, scores, sizes and times."""
        try:
            return dict(read_manifest(self.stage(run, stage) / "artifact").facts)
        except ArtifactError as error:
            raise ValueError(f"stage {stage!r} has not written figures: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shortened(text: str) -> str:
    """Cuts a text at the limit and says how long it was."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}\n[cut: {len(text):,} characters]"


def make_server(folder: Path) -> FastMCP:
    """Returns a server whose tools are the public methods of a `RunFolder` that read."""
    runs = RunFolder(folder)
    server = FastMCP("modelwright", instructions="Reads the training runs of a folder. Nothing is written.")
    reads: list[Callable[..., Any]] = [
        *(runs.list_runs, runs.read_settings, runs.list_metrics, runs.read_metric, runs.read_samples),
        runs.read_figures,
    ]
    for read in reads:
        server.add_tool(_checked(read), annotations=ToolAnnotations(readOnlyHint=True, openWorldHint=False))
    return server


def _checked(read: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with errors of this project as the plain ones that a client is shown."""

    @functools.wraps(read)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return read(*args, **kwargs)
        except ModelwrightError as error:
            raise ValueError(str(error)) from None

    return checked


def run_server_over(folder: Path) -> None:
    """Serves until standard input ends."""
    make_server(folder).run()
