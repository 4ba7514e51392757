"""The state of a federated training on disk: the number of rounds done, and what the next one starts from."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from modelwright.core.artifacts import make_folder, write_atomic
from modelwright.core.errors import ArtifactError, writing

STATE, WEIGHTS = "round.json", "global-{}.safetensors"


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """What a server keeps from round to round."""

    num_rounds: int = 0
    """Rounds done, those included that gave no update."""
    weights: np.ndarray
    """The global weights [N, float32] after them."""
    median_norm: float | None = None
    """`Aggregate.median_norm` of the last round that changed the weights."""


def write_round(folder: Path, state: RoundState) -> None:
    """Write the weights, then the file that names them, then remove the older weights."""
    make_folder(folder)
    path = folder / WEIGHTS.format(state.num_rounds)
    with writing(path):
        save_file({"weights": state.weights}, path)
    plain = {"num_rounds": state.num_rounds, "weights": path.name, "median_norm": state.median_norm}
    write_atomic(folder / STATE, json.dumps(plain))
    for older in folder.glob(WEIGHTS.format("*")):
        if older != path:
            older.unlink(missing_ok=True)


def read_round(folder: Path, *, start: np.ndarray) -> RoundState:
    """The state after the last round; before the first one it has the weights `start` [N, float32]. Raises
    `ArtifactError` for damaged files.
    """
    if not (folder / STATE).exists():
        return RoundState(weights=start)
    try:
        plain = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return RoundState(
            num_rounds=int(plain["num_rounds"]),
            weights=load_file(folder / plain["weights"])["weights"],
            median_norm=plain.get("median_norm"),
        )
    except Exception as error:  # safetensors has errors of its own
        raise ArtifactError(f"{folder / STATE}: is damaged ({error}); remove {folder} to start over") from None
