"""The folder of a model that is served."""

from pathlib import Path

from modelwright.core.artifacts import RunDir, is_finished
from modelwright.pipeline.models import find_model
from modelwright_continual.ancestry import run_of_artifact
from modelwright_continual.lineage import RELEASE_FOLDER
from modelwright_continual.update import quantized_folder


def served_folder(model: Path) -> Path:
    """Returns the folder that is served: the release of an update, else the quantized model of a run, else the model
    itself. model: a run, the folder of one of its stages, or any model folder.
    """
    run = run_of_artifact(model) or RunDir(model)
    for folder in (run.path / RELEASE_FOLDER, quantized_folder(run)):
        if is_finished(folder):
            return folder
    return find_model(model).source.folder
