"""The runs that a model has learned in: its own, the one whose model that run began with, and so on to the first."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelwright.core.artifacts import is_finished, read_manifest
from modelwright.core.errors import ArtifactError
from modelwright.core.rundir import RunDir
from modelwright.pipeline.run_config import read_run_config
from modelwright.pipeline.stages.init import INIT
from modelwright_continual.model_files import LINEAGE


@dataclass(frozen=True, kw_only=True)
class Ancestry:
    """runs: the newest first; lost: the folder of a model that a run has made and that is gone, with all before it, ""
    if there is none.
    """

    runs: tuple[RunDir, ...] = ()
    lost: str = ""


def ancestry_of(model: Path) -> Ancestry:
    """The runs before and with `model`: a run, the artifact of a stage, a release, or any model folder. It ends at a
    folder that no run has made. Raises `ArtifactError` for a damaged release.
    """
    runs: list[RunDir] = []
    run = run_of_model(model)
    while run is not None and run.path not in [one.path for one in runs]:
        runs.append(run)
        start = read_run_config(run.config).init_from
        run = run_of_model(Path(start)) if start else None
        if start and run is None and not Path(start).exists() and _was_made_by_a_run(runs[-1]):
            return Ancestry(runs=tuple(runs), lost=start)
    return Ancestry(runs=tuple(runs))


def run_of_model(folder: Path) -> RunDir | None:
    """The run that a model belongs to; None for a folder that belongs to none."""
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
    """The run that a folder is the artifact of a stage of, None if it is not one."""
    stage = folder.resolve().parent
    is_artifact = folder.resolve().name == "artifact" and (stage.parent / "run.json").is_file()
    return RunDir(stage.parent) if is_artifact else None


def _recorded_folder(path: Path) -> Path:
    try:
        return Path(json.loads(path.read_text(encoding="utf-8"))["folder"])
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path}: is damaged ({error}); take the run that made the folder") from None


def _was_made_by_a_run(run: RunDir) -> bool:
    """Whether a stage had written the folder that `run` began with."""
    init = run.stage(INIT.name).artifact
    return is_finished(init) and "content" in read_manifest(init).facts
