"""The tiny run under a layout: losses and final whole weights, to compare with those of one process.

parity_run.py FOLDER CASES.json: as one rank, run a list of objects with the fields of `Case`, one after the other. Each
leaves FOLDER/NAME/metrics.jsonl (first rank) and FOLDER/NAME/rank<r>.safetensors (every rank).
"""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

import tiny_run as tiny

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, join_world, single


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. `compute` fp64 computes with the definition of the loss; shape: changes to the model's shape;
    settings: changes to the training config."""

    name: str = "run"
    layout: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    compute: str = "fp32"
    microbatches: int = 1
    activation: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def run_case(case: Case, folder: Path, world: World | None = None) -> dict[str, torch.Tensor]:
    """Train; leave metrics.jsonl and return the whole final weights, the same on every rank."""
    model = Decoder(replace(tiny.SHAPE, **case.shape))
    model.init_weights(0)
    exact = case.compute == "fp64"
    config = tiny.settings(
        num_steps=case.steps,
        num_microbatches=case.microbatches,
        activations=case.activation,
        **{"precision": {"policy": "bf16_mixed" if case.compute == "bf16" else "fp32"}, **case.settings},
    )
    model = model.double() if exact else model
    tiny.run(
        folder / case.name,
        config,
        model=model,
        world=world or single(),
        parallel=parse(ParallelConfig, case.layout),
        **({"objective": tiny.Float64Objective(tiny.Rows())} if exact else {}),
    )
    return model.state_dict()


def main() -> None:
    folder, listing = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    with join_world(torch.device("cpu")) as world:
        for fields in json.loads(listing.read_text()):
            case = Case(**fields)
            weights = run_case(case, folder, world)
            save_file(weights, folder / case.name / f"rank{world.rank}.safetensors")


if __name__ == "__main__":
    main()
