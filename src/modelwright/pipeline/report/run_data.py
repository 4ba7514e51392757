"""Contents of a run's folder, read once for the report. Stages that have not run are empty."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelwright.core.artifacts import ArtifactError, RunDir, StageDir, read_attempts, read_manifest
from modelwright.core.records import read_records
from modelwright.pipeline.stage import RunConfig


@dataclass(frozen=True)
class StageData:
    """Results of a stage: facts of its manifest, metric records, attempts, and its artifact's folder."""

    name: str
    folder: StageDir
    facts: Mapping[str, Any]
    attempts: list[dict[str, Any]]
    is_done: bool

    def records(self) -> list[dict[str, Any]]:
        """Reads the metric records."""
        # Non-finite numbers are stored as strings, because JSON lacks them.
        return [
            {key: float(one) if one in ("nan", "inf", "-inf") else one for key, one in record.items()}
            for record in read_records(self.folder.metrics)
        ]

    def json(self, name: str) -> Any:
        """Reads a JSON file of the artifact, `{}` if it does not exist."""
        try:
            return json.loads((self.folder.artifact / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Reads a JSON-lines file of the artifact."""
        return read_records(self.folder.artifact / name)


@dataclass(frozen=True)
class RunData:
    """The run: its configuration, run.json and stages by name."""

    config: RunConfig
    run: RunDir
    info: Mapping[str, Any]
    stages: Mapping[str, StageData]

    @property
    def model_titles(self) -> dict[str, str]:
        """Titles of the models in tables, by the stage's name."""
        return {stage.name: stage.model_title for stage in self.config.model_stages}

    def done(self, name: str) -> StageData | None:
        """Returns the stage if it has finished, else `None`."""
        stage = self.stages.get(name)
        return stage if stage is not None and stage.is_done else None


def read_run(config: RunConfig, run: RunDir) -> RunData:
    """Reads everything except large files."""
    try:
        info = run.read_info()
    except ArtifactError:
        info = {}
    stages: dict[str, StageData] = {}
    for name in (spec.name for spec in config.stages):
        folder = run.stage(name)
        try:
            facts, is_done = read_manifest(folder.artifact, kind=name).facts, True
        except ArtifactError:
            facts, is_done = {}, False
        stages[name] = StageData(name, folder, facts, read_attempts(folder), is_done)
    return RunData(config, run, info, stages)
