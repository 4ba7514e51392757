"""Which model of a run is meant, and a run's model written out for others."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.core.artifacts import MANIFEST, is_complete, write_artifact
from modelwright.core.config import load_yaml, parse
from modelwright.core.errors import ArtifactError, ConfigError
from modelwright.core.rundir import RunDir
from modelwright.pipeline.config import RunConfig
from modelwright.serve.config import ServeConfig


@dataclass(frozen=True)
class FoundModel:
    """A model folder, what to call it, and the server settings that its run was configured with."""

    folder: Path
    name: str
    server: ServeConfig = field(default_factory=ServeConfig)


def find_model(path: Path, *, int8: bool) -> FoundModel:
    """The model in a model folder, or the last finished one of a run directory; with `int8` the quantised one.

    Raises `ArtifactError` when the run has none yet.
    """
    if not (path / "run.json").is_file():
        return FoundModel(path, path.resolve().name)
    run = RunDir(path)
    config = parse(RunConfig, load_yaml(run.config))
    wanted = ("quantize",) if int8 else tuple(reversed(config.trained_stages))
    return FoundModel(_artifact(run, wanted), config.name, config.serve.server)


def export_hf(run: RunDir, target: Path, *, stage: str, overwrite: bool) -> Path:
    """Copy a run's model (`stage`, "" for the last) to `target`, whole or not at all. Returns `target`."""
    config = parse(RunConfig, load_yaml(run.config))
    if stage and stage not in config.trained_stages:
        raise ConfigError(f"--stage: {stage!r} holds no model; choose from {', '.join(config.trained_stages)}")
    source = _artifact(run, (stage,) if stage else tuple(reversed(config.trained_stages)))
    if overwrite and target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise ConfigError(f"{target}: holds something else than a model, so it is not replaced; choose another folder")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: is a file, so it is not replaced by a folder; choose another one")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists; choose another folder or add --overwrite")
    with write_artifact(target, kind="export", digest="") as draft:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name != MANIFEST:
                shutil.copyfile(path, draft.path / path.name)
        draft.facts["from"] = str(source)
    (target / MANIFEST).unlink()
    return target


def _artifact(run: RunDir, stages: tuple[str, ...]) -> Path:
    for name in stages:
        folder = run.stage(name).artifact
        if is_complete(folder):
            return folder
    needed = " or ".join(stages) or "training"
    raise ArtifactError(f"{run.path}: has no finished model yet ({needed}); go on with: modelwright run {run.path}")
