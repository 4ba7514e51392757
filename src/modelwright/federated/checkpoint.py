"""The state of a federated training on disk: the number of rounds done, and the global weights after them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from modelwright.core.artifacts import make_folder, write_atomic
from modelwright.core.errors import ArtifactError, writing

STATE, WEIGHTS = "round.json", "global-{}.safetensors"


def write_round(folder: Path, num_rounds: int, weights: np.ndarray) -> None:
    """Write the weights [N, float32], then the number of rounds that names them, then remove the older weights."""
    make_folder(folder)
    path = folder / WEIGHTS.format(num_rounds)
    with writing(path):
        save_file({"weights": weights}, path)
    write_atomic(folder / STATE, json.dumps({"num_rounds": num_rounds, "weights": path.name}))
    for older in folder.glob(WEIGHTS.format("*")):
        if older != path:
            older.unlink(missing_ok=True)


def read_round(folder: Path) -> tuple[int, np.ndarray | None]:
    """Rounds done and the weights [N, float32] after them; 0 and None at the start. Raises `ArtifactError` for damaged
    files.
    """
    if not (folder / STATE).exists():
        return 0, None
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return int(state["num_rounds"]), load_file(folder / state["weights"])["weights"]
    except Exception as error:  # safetensors has errors of its own
        raise ArtifactError(f"{folder / STATE}: is damaged ({error}); remove {folder} to start over") from None
