"""Training from a folder whose weights are read by each rank for itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_run as tiny
import torch

from modelwright.core.config import parse
from modelwright.model.hf import StoredWeights, deferred_model, load_model
from modelwright.parallel.mesh import ParallelConfig, World, single


def train_from(
    folder: Path, stage: Path, layout: Mapping[str, Any], world: World | None = None, *, deferred: bool = True
) -> tuple[dict[str, torch.Tensor], int]:
    """The whole final weights, and how many elements this process read from the folder."""
    num_read, read = 0, StoredWeights.read

    def counted(self: StoredWeights, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        nonlocal num_read
        piece = read(self, name, part)
        num_read += piece.numel()
        return piece

    model = deferred_model(folder) if deferred else load_model(folder)
    with mock.patch.object(StoredWeights, "read", counted):
        tiny.run(
            stage,
            tiny.settings(num_steps=1, eval_every_steps=0, checkpoint_every_steps=0),
            model=model,
            world=world or single(),
            parallel=parse(ParallelConfig, layout),
        )
    return {name: weight.clone() for name, weight in model.state_dict().items()}, num_read


def train_in_turn(
    world: World, folder: Path, stage: Path, layouts: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[int, list[str]]]:
    """Elements read under each layout, and the weights that differ in a bit from those of a model that was loaded."""
    found: dict[str, tuple[int, list[str]]] = {}
    for name, layout in layouts.items():
        weights, num_read = train_from(folder, stage / name, layout, world)
        loaded, _ = train_from(folder, stage / f"{name}-loaded", layout, world, deferred=False)
        found[name] = num_read, [key for key in loaded if not torch.equal(weights[key], loaded[key])]
    return found
