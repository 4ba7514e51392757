"""The tiny run under a layout, to compare its losses and final whole weights with those of one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tiny_run as tiny
import torch

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.model.hf import deferred_model
from modelwright.parallel.mesh import ParallelConfig, World, single


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. `compute` fp64 computes with the definition of the loss; shape: changes to the model's shape;
    settings: changes to the training config; deferred: a folder from which ranks read
    their parts of the weights."""

    name: str = "run"
    layout: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    compute: str = "fp32"
    microbatches: int = 1
    activation: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    deferred: str = ""


def run_case(case: Case, folder: Path, world: World | None = None) -> dict[str, torch.Tensor]:
    """Train; leave metrics.jsonl and return the whole final weights, the same on every rank."""
    model = deferred_model(Path(case.deferred)) if case.deferred else Decoder(replace(tiny.SHAPE, **case.shape))
    if not case.deferred:
        model.init_weights(0)
    exact = case.compute == "fp64"
    config = tiny.settings(
        num_steps=case.steps,
        gradient_accumulation_steps=case.microbatches,
        activation_checkpointing=case.activation,
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


def run_cases(world: World, folder: Path, cases: Sequence[Case]) -> dict[str, dict[str, torch.Tensor]]:
    """Run the cases one after the other; their weights by name."""
    weights = {case.name: run_case(case, folder, world) for case in cases}
    return {name: {key: weight.clone() for key, weight in found.items()} for name, found in weights.items()}
