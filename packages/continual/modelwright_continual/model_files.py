"""The files of a model folder that define the model, as opposed to those that describe it."""

from pathlib import Path

from modelwright.core.artifacts import MANIFEST, ArtifactError, describe_file
from modelwright.core.config import digest

LINEAGE, GATE_VERDICT = "lineage.json", "gate-verdict.json"
NOT_OF_MODEL = (MANIFEST, "results.json", LINEAGE, GATE_VERDICT)
"""Files that only describe the model; without them, a release and the artifact that it was copied from are the same
model."""


def model_digest(folder: Path) -> str:
    """Hashes the files that determine a model's answers. Raises `ArtifactError` if the folder has none."""
    # The chat template (*.jinja) also determines answers.
    files = sorted(path for pattern in ("*.json", "*.safetensors", "*.jinja") for path in folder.glob(pattern))
    files = [path for path in files if path.name not in NOT_OF_MODEL]
    if not files:
        raise ArtifactError(
            f"{folder}: does not contain a model; give a model folder with config.json and safetensors files"
        )
    return digest({path.name: describe_file(path)["sha256"] for path in files})
