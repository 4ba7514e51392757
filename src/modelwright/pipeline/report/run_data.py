"""The contents of a run's folder, read once for the report. Stages that have not run are empty."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelwright.core.artifacts import read_manifest
from modelwright.core.errors import ArtifactError
from modelwright.core.records import read_records
from modelwright.core.rundir import RunDir, StageDir
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage_log import read_attempts
from modelwright.train.techniques.adaptive_precision import CHANGES


@dataclass(frozen=True)
class StageData:
    """One stage's results: facts of its manifest, metric records, attempts, and its artifact's folder."""

    name: str
    folder: StageDir
    facts: Mapping[str, Any]
    attempts: list[dict[str, Any]]
    is_done: bool

    def records(self) -> list[dict[str, Any]]:
        """Metric records; non-finite numbers are converted back to numbers."""
        return [{key: _number(value) for key, value in record.items()} for record in read_records(self.folder.metrics)]

    def json(self, name: str) -> Any:
        """A JSON file of the artifact, `{}` if it does not exist."""
        try:
            return json.loads((self.folder.artifact / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A JSON-lines file of the artifact."""
        return read_records(self.folder.artifact / name)

    def watch(self) -> list[dict[str, Any]]:
        return read_records(self.folder.path / "anomalies.jsonl")

    def format_changes(self) -> list[dict[str, Any]]:
        """The changes made by adaptive precision, in order."""
        return read_records(self.folder.path / CHANGES)


@dataclass(frozen=True)
class RunData:
    """The run: its configuration, run.json and stages by name."""

    config: RunConfig
    run: RunDir
    info: Mapping[str, Any]
    stages: Mapping[str, StageData]

    @property
    def model_titles(self) -> dict[str, str]:
        """What each stage's model is called in tables, by the stage's name."""
        return {stage.name: stage.model_title for stage in self.config.model_stages}

    def done(self, name: str) -> StageData | None:
        """A stage that has finished, else `None`."""
        stage = self.stages.get(name)
        return stage if stage is not None and stage.is_done else None


def read_run(config: RunConfig, run: RunDir) -> RunData:
    """Read everything except large files."""
    try:
        info = run.read_info()
    except ArtifactError:
        info = {}
    return RunData(config, run, info, {one.name: _read_stage(run.stage(one.name), one.name) for one in config.stages})


def _read_stage(folder: StageDir, name: str) -> StageData:
    try:
        facts, is_done = read_manifest(folder.artifact, kind=name).facts, True
    except ArtifactError:
        facts, is_done = {}, False
    return StageData(name, folder, facts, read_attempts(folder), is_done)


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
