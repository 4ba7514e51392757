"""The chain of runs behind a model: its own run, the run whose model it began with, and so on back to the first."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelwright.core.artifacts import ArtifactError, RunDir, is_finished, read_manifest
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.init import INIT
from modelwright_continual.model_files import LINEAGE


@dataclass(frozen=True, kw_only=True)
class Ancestry:
    """A model's chain of runs. runs: newest first; lost: folder of a model that was made by a run and no longer exists,
    so that the chain ends there; "" if the chain is complete.
    """

    runs: tuple[RunDir, ...] = ()
    lost: str = ""


def ancestry_of(model: Path) -> Ancestry:
    """Returns the runs behind `model`, its own included. model: a run, the artifact of a stage, a release, or any model
    folder. The chain ends at a folder that was not made by a run. Raises `ArtifactError` for a damaged release.
    """
    runs: list[RunDir] = []
    run = run_of_model(model)
    # A release can name a run that appears earlier in the chain; without this check the loop would not end.
    while run is not None and run.path not in [one.path for one in runs]:
        runs.append(run)
        start = read_run_config(run.config).init_from
        run = run_of_model(Path(start)) if start else None
        if start and run is None and not Path(start).exists() and _was_made_by_a_run(runs[-1]):
            return Ancestry(runs=tuple(runs), lost=start)
    return Ancestry(runs=tuple(runs))


def run_of_model(folder: Path) -> RunDir | None:
    """Returns the run that a model belongs to, or None if it does not belong to a run."""
    return next((run for run in _possible_runs(folder) if run is not None), None)


def _possible_runs(folder: Path) -> Iterator[RunDir | None]:
    if (folder / "run.json").is_file():
        yield RunDir(folder.resolve())
    yield run_of_artifact(folder)
    if (folder / LINEAGE).is_file():  # a release, in the run that wrote it or somewhere else
        above = folder.resolve().parent
        yield RunDir(above) if (above / "run.json").is_file() else None
        yield run_of_artifact(_recorded_folder(folder / LINEAGE))


def run_of_artifact(folder: Path) -> RunDir | None:
    """Returns the run in which `folder` is the artifact of a stage, or None if it is not such an artifact."""
    stage = folder.resolve().parent
    is_artifact = folder.resolve().name == "artifact" and (stage.parent / "run.json").is_file()
    return RunDir(stage.parent) if is_artifact else None


def _recorded_folder(path: Path) -> Path:
    try:
        return Path(json.loads(path.read_text(encoding="utf-8"))["folder"])
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path}: is damaged ({error}); take the run that made the folder") from None


def _was_made_by_a_run(run: RunDir) -> bool:
    """Returns whether the folder that `run` began with was written by a stage."""
    init = run.stage(INIT.name).artifact
    return is_finished(init) and "content" in read_manifest(init).facts
