"""Small optimizer states do not depend on the layout: blocks and random bits follow the position in the parameter."""

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distributed import run_distributed
from modelwright.parallel.mesh import ParallelConfig, World
from modelwright.train.optim.adamw import LowBitAdamW, States

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = ((40, 96), (8, 512), (7, 33), (130,), (3,))
"""Blocks of 256 are cut by rows, by columns, in odd places, and parts are empty."""
PLACEMENTS = (
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), Replicate()),
)


def updated(states: States, distribute: Any) -> dict[str, Tensor]:
    """Weights and states of all shapes after three updates; distribute: applied to weights and gradients."""
    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(distribute(torch.randn(shape, generator=draw))) for shape in SHAPES]
    names = {weight: str(number) for number, weight in enumerate(weights)}
    optimizer = LowBitAdamW([{"params": weights}], **SETTINGS, names=names, states=states)  # pyright: ignore
    for _ in range(3):
        for weight, shape in zip(weights, SHAPES, strict=True):
            weight.grad = distribute(torch.randn(shape, generator=draw) ** 3)
        optimizer.step()
    result = {}
    for weight, name in names.items():
        state = optimizer.state[weight]
        for key, value in {"weight": weight.detach(), **state}.items():
            result[f"{name}/{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return result


def on_four_ranks(world: World) -> dict[str, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2))
    found: dict[str, dict[str, Tensor]] = {}
    for states in ("int8", "bf16"):
        for placements in PLACEMENTS:

            def distribute(whole: Tensor, placements: Any = placements) -> Tensor:
                usable = [one if one.is_replicate() or one.dim < whole.dim() else Replicate() for one in placements]
                return distribute_tensor(whole, mesh, usable)

            found[f"{states} {placements}"] = updated(states, distribute)
    return found


@pytest.mark.slow
def test_updates_and_states_are_equal_to_the_bit_however_a_parameter_is_divided() -> None:
    for found in run_distributed(on_four_ranks, 4):
        for case, tensors in found.items():
            alone = updated(case.split()[0], lambda whole: whole)  # pyright: ignore
            assert all(torch.equal(value, alone[key]) for key, value in tensors.items()), case


LAYOUTS = ({"shared_memory": False}, {"zero_stage": 3}, {"tensor": 2}, {"pipeline": 2})


def trained(folder: Path, kind: str, **more: Any) -> dict[str, Tensor]:
    config = tiny_run.settings(num_steps=4, optimizer=kind, checkpoint_every_steps=0, eval_every_steps=0)
    model = tiny_run.run_in_float64(folder, config, heldout=[], **more)
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def train_layouts(world: World, folder: Path, kind: str) -> list[dict[str, Tensor]]:
    return [
        trained(folder / str(number), kind, world=world, parallel=ParallelConfig(**layout))
        for number, layout in enumerate(LAYOUTS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_bf16_states"])
def test_every_layout_trains_to_the_same_weights(kind: str, tmp_path: Path) -> None:
    """Gradients are summed in FP64, so that only blocks and random bits could tell the layouts apart: by 8e-3 while
    they followed the shards."""
    alone = trained(tmp_path / "alone", kind)
    for found in run_distributed(train_layouts, 2, tmp_path, kind):
        for weights in found:
            for name, weight in weights.items():
                torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-6)
