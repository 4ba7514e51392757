"""Which files of a model folder are the model, and which only say something about it."""

from pathlib import Path

from modelwright.core.artifacts import MANIFEST, describe_file
from modelwright.core.config import digest
from modelwright.core.errors import ArtifactError

LINEAGE, GATE_VERDICT = "lineage.json", "gate-verdict.json"
NOT_OF_MODEL = (MANIFEST, "results.json", LINEAGE, GATE_VERDICT)
"""Files that say something about the model: a release and the artifact that it was copied from are the same model."""


def model_digest(folder: Path) -> str:
    """A hash of the files that decide what a model says. Raises `ArtifactError` if the folder has none."""
    files = sorted(path for pattern in ("*.json", "*.safetensors", "*.jinja") for path in folder.glob(pattern))
    files = [path for path in files if path.name not in NOT_OF_MODEL]
    if not files:
        raise ArtifactError(f"{folder}: holds no model; give a model folder with config.json and safetensors files")
    return digest({path.name: describe_file(path)["sha256"] for path in files})
