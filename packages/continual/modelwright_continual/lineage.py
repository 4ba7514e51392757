"""The origin of a model: its run, data, configuration and commits, and those of the models before it, back to the
first.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import MANIFEST, ArtifactError, RunDir, is_finished, read_manifest
from modelwright.core.config import ConfigError
from modelwright.core.texts import redact_text
from modelwright.pipeline.models import find_model
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.clean import CLEAN
from modelwright.pipeline.stages.init import INIT
from modelwright_continual.ancestry import run_of_artifact
from modelwright_continual.gate.judge import FOLDER as GATE_FOLDER
from modelwright_continual.gate.judge import Verdict
from modelwright_continual.model_files import LINEAGE
from modelwright_continual.update_files import data_folder

RELEASE_FOLDER = "release"
UNKNOWN = "a folder that no stage wrote; where it comes from is not recorded"


@dataclass(frozen=True, kw_only=True)
class ModelLineage:
    """Origin of a model. content: SHA-256 over its files (over its weights for a folder that no stage wrote); data: the
    sources of the run and the SHA-256 of the cleaned texts, and for an update the files of new texts with theirs;
    stages: content digests of all stages; gate: the verdict that it passed with; parent: the model that its training
    began with.
    """

    folder: str
    content: str
    run: str = ""
    stage: str = ""
    commits: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    config_sha256: str = ""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stages: Mapping[str, str] = field(default_factory=dict[str, str])
    gate: Mapping[str, Any] = field(default_factory=dict[str, Any])
    parent: "ModelLineage | None" = None
    note: str = ""

    def ancestors(self) -> "Iterator[ModelLineage]":
        """Yields this model and those before it, newest first."""
        yield self
        if self.parent is not None:
            yield from self.parent.ancestors()

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def as_text(self) -> str:
        """Formats the whole lineage for a terminal."""
        return "\n".join(line for one in self.ancestors() for line in one.lines())

    def lines(self) -> list[str]:
        """Formats this model alone."""
        lines = [self.folder, f"  sha256   {self.content}"]
        if self.note:
            lines.append(f"  note     {self.note}")
        if self.run:
            lines.append(f"  run      {self.run}, stage {self.stage}, config sha256 {self.config_sha256}")
            lines.append(
                f"  code     modelwright {', '.join(self.versions)}, commit {', '.join(self.commits) or 'none'}"
            )
        for source in self.data.get("sources", ()):
            lines.append(f"  data     {_shown(source)}")
        for source in self.data.get("replayed", ()):
            lines.append(f"  replay   {self.data['replay']:.0%} of {_shown(source)}")
        if cleaned := self.data.get("cleaned"):
            lines.append(f"  cleaned  sha256 {cleaned}")
        if self.gate:
            lines.append(f"  gate     passed against {self.gate['champion']} on benchmark {self.gate['benchmark']}")
        return lines

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "ModelLineage":
        """Inverts `as_json`, from the parsed object."""
        values = dict(plain)
        parent = values.pop("parent", None)
        for name in ("commits", "versions"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values, parent=cls.from_plain(parent) if parent else None)


def trace(path: Path) -> ModelLineage:
    """Returns the lineage of a model. path: a run, a folder of one of its stages, a release, or any model folder.

    Raises `ConfigError` if the path contains no model, and `ArtifactError` if a model was changed after the next one
    had begun with it, or its record is damaged.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: is neither a model folder nor a run directory")
    if (path / LINEAGE).is_file():
        return _recorded(path)
    if (path / "run.json").is_file():
        return _of_stage(RunDir(path), find_model(path).source.stage)
    if run := run_of_artifact(path):
        return _of_stage(run, path.resolve().parent.name)
    return _of_folder(path)


def _recorded(folder: Path) -> ModelLineage:
    read_manifest(folder, verify=True)
    try:
        return ModelLineage.from_plain(json.loads((folder / LINEAGE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{folder / LINEAGE}: is damaged ({error}); trace the run that made the folder") from None


def _of_stage(run: RunDir, stage: str) -> ModelLineage:
    info, config = run.read_info(), read_run_config(run.config)
    manifest = read_manifest(run.stage(stage).artifact, kind=stage)
    contents = {name: str(one.get("content", "")) for name, one in info["stages"].items()}
    calls = [call for call in info["invocations"] if isinstance(call, dict)]
    return ModelLineage(
        folder=str(run.stage(stage).artifact.resolve()),
        content=manifest.content_digest,
        run=config.name,
        stage=stage,
        commits=tuple(dict.fromkeys(call["commit"] for call in calls if call.get("commit"))),
        versions=tuple(dict.fromkeys(call["versions"]["modelwright"] for call in calls if "versions" in call)),
        config_sha256=hashlib.sha256(run.config.read_bytes()).hexdigest(),
        data=_data(run, config.data.sources) | {"cleaned": contents.get(CLEAN.name, "")},
        stages=contents,
        gate=_gate(run),
        parent=_parent(run, Path(config.init_from)) if config.init_from else None,
    )


def _data(run: RunDir, sources: tuple[str, ...]) -> dict[str, Any]:
    folder = data_folder(run)
    if not is_finished(folder):
        return {"sources": [{"name": redact_text(source)} for source in sources]}
    facts = read_manifest(folder).facts
    replayed = [*({"name": run} for run in facts["old_runs"]), *facts["old_sources"]]
    if own := facts.get("own_texts"):
        replayed = [{"name": "texts that the model wrote itself", "sha256": own}]
    return {"sources": facts["sources"], "replayed": replayed if facts["old"] else [], "replay": facts["replay"]}


def _gate(run: RunDir) -> dict[str, Any]:
    folder = run.path / GATE_FOLDER
    if not is_finished(folder):
        return {}
    verdict = Verdict.read(folder)
    names = ("candidate", "champion", "benchmark", "use")
    return {name: getattr(verdict, name) for name in names} if verdict.passed else {}


def _parent(run: RunDir, folder: Path) -> ModelLineage:
    """Returns the lineage of the model that the run began with, or its record in the run's release if the folder is
    gone.
    """
    if not folder.is_dir():
        release = run.path / RELEASE_FOLDER
        if (release / LINEAGE).is_file() and (known := _recorded(release).parent):
            return known
        return ModelLineage(folder=str(folder), content="", note="the folder is gone, and no release recorded it")
    parent = trace(folder)
    init = run.stage(INIT.name).artifact
    imported = read_manifest(init).facts.get("content", "") if is_finished(init) else ""
    if imported and (folder / MANIFEST).is_file() and read_manifest(folder).content_digest != imported:
        raise ArtifactError(
            f"{folder}: is another model than {run.path} began with (sha256 {imported}); put that one back to trace it"
        )
    return parent


def _of_folder(folder: Path) -> ModelLineage:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"{folder}: is neither a model folder nor a run directory")
    total = hashlib.sha256()
    for path in weights:
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return ModelLineage(folder=str(folder.resolve()), content=total.hexdigest(), note=UNKNOWN)


def _shown(source: Mapping[str, Any]) -> str:
    content = source.get("sha256")
    return f"{source['name']} sha256 {content}" if content else str(source["name"])
