"""Checkpoints of ranks that hold different pieces, for `test_shards`.

Every tensor's values are a function of its name, and PyTorch's own parallel parts cut them up, so what was loaded under
any layout is compared with what those parts make of the truth.
"""

import os
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from modelwright.core.config import ModelwrightError
from modelwright.parallel.mesh import World, join_world
from modelwright.train.checkpoint import writer
from modelwright.train.checkpoint.files import Best
from modelwright.train.checkpoint.reader import CheckpointReader
from modelwright.train.checkpoint.writer import CheckpointWriter, Snapshot

AXES = {
    "one": {},
    "copies2": {"copies": 2},
    "copies2tp2": {"copies": 2, "tp": 2},
    "fsdp2tp2": {"fsdp": 2, "tp": 2},
    "hybrid2x2": {"copies": 2, "fsdp": 2},
    "pp2fsdp2": {"pp": 2, "fsdp": 2},
    "tp3": {"tp": 3},
}
SHAPES = {"first": (7, 5), "second": (5, 9), "norm": (1, 7), "tied": (3, 11)}
"""Sizes that nothing divides; `second` has a bias."""
STAGES = (("first", "tied"), ("second", "norm", "tied"))


class Run:
    """A model without a run around it: weights, optimizer state, and a transport that remembers."""

    def __init__(self, layout: str, world: World, *, scale: float = 1.0) -> None:
        axes = AXES[layout]
        self.layout = layout
        self.world = self.reduce = world
        self.model = nn.ModuleDict({name: _linear(name, *shape) for name, shape in SHAPES.items()})
        for parameter in self.model.parameters():
            parameter.data.mul_(scale)
        if not axes:
            return
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        if "pp" in axes:
            for name in set(SHAPES) - set(STAGES[mesh["pp"].get_local_rank()]):
                del self.model[name]
        if "tp" in axes:
            parallelize_module(self.model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        if "fsdp" in axes:
            shard = mesh["copies", "fsdp"] if "copies" in axes else mesh["fsdp"]
            for part in self.model.values():
                fully_shard(part, mesh=shard)
        size = axes.get("copies", 1)
        rank = mesh["copies"].get_local_rank() if size > 1 else 0
        self.reduce = World(rank=rank, size=size, device=world.device)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def state(self) -> dict:
        optimizer = {
            name: {"step": torch.tensor(7.0), "exp_avg": weight * 2, "exp_avg_sq": weight * 3}
            for name, weight in self.weights.items()
        }
        return {
            "trainer": {"step": 7, "loss": 0.25},
            "optimizer": optimizer,
            "techniques": {"other": {"seen": torch.tensor([True, False])}},
            "strategy": {
                "residuals": [_local(weight) * (1 + self.reduce.rank) for weight in self.weights.values()],
                "shared": {"anchor": [_local(weight) for weight in self.weights.values()]},
                "warm": 0.5,
            },
        }

    def checkpoints(self, folder: Path) -> CheckpointWriter:
        """Two ranks are a host with a memory of its own."""
        memory = folder.parent / f"memory{self.world.rank // 2}"
        made = CheckpointWriter(
            CheckpointReader(folder, digest="d", world=self.world, reduce=self.reduce, memory=memory), keep_last=3
        )
        made.reader.prepare()
        return made


def _linear(name: str, rows: int, columns: int) -> nn.Linear:
    linear = nn.Linear(columns, rows, bias=name == "second")
    for part, parameter in linear.named_parameters():
        draw = torch.Generator().manual_seed(zlib.crc32(f"{name}.{part}".encode()))
        parameter.data = torch.randn(parameter.shape, generator=draw)
    return linear


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(run: Run, folder: Path, *steps: str, keep: bool = False) -> None:
    found = run.checkpoints(folder)
    try:
        for step in map(int, steps):
            snapshot = Snapshot(step=step, weights=run.weights, state=run.state(), gradients=list(run.weights))
            if keep:
                found.keep(snapshot, best=Best())
            else:
                found.save(snapshot, best=Best(step=step, loss=1.0))
        found.wait()
    finally:
        found.close()


def check(run: Run, folder: Path, num_copies: str, step: str) -> list[str]:
    """Load into a model of zeros, compare, and return the notes on the first rank.

    num_copies: ranks of the transport that wrote the checkpoint.
    """
    target = Run(run.layout, run.world, scale=0.0)
    found = target.checkpoints(folder)
    notes: list[str] = []
    assert found.reader.latest_step(notes.append) == int(step), notes
    state = found.reader.load(int(step), target.weights, gradients=list(target.weights), note=notes.append)
    found.close()
    expected = run.state()
    assert list(state["optimizer"]) == list(expected["optimizer"])
    for name, weight in run.weights.items():
        same(target.weights[name], weight)
        for key, value in expected["optimizer"][name].items():
            same(state["optimizer"][name][key], value)
    same(state["techniques"]["other"]["seen"], torch.tensor([True, False]))
    assert state["trainer"] == expected["trainer"]
    n = int(num_copies)
    m = run.reduce.size
    share = 1 + run.reduce.rank if n == m else n * (n + 1) / 2 / m
    assert state["strategy"]["warm"] == 0.5
    for weight, residual, anchor in zip(
        run.weights.values(), state["strategy"]["residuals"], state["strategy"]["shared"]["anchor"], strict=True
    ):
        torch.testing.assert_close(residual, _local(weight) * share)
        same(anchor, _local(weight))
    return notes if run.world.is_first else []


def same(found: Tensor, expected: Tensor) -> None:
    assert isinstance(found, DTensor) == isinstance(expected, DTensor)
    if isinstance(found, DTensor) and isinstance(expected, DTensor):
        assert found.placements == expected.placements
        assert found.device_mesh == expected.device_mesh
    assert found.shape == expected.shape
    assert torch.equal(_local(found), _local(expected))


def fail_on_one_rank(run: Run, folder: Path, step: str) -> None:
    """Rank 1's disk is full at the second checkpoint."""
    if run.world.rank == 1:

        def refuse(tensors, path):
            raise writer.SafetensorError("I/O error: No space left on device (os error 28)")

        writer.save_file = refuse
    save(run, folder, step)


def die_on_one_rank(run: Run, folder: Path, step: str) -> None:
    if run.world.rank == 1:
        writer.save_file = lambda tensors, path: os._exit(9)
    save(run, folder, step)


ACTIONS = {
    "save": save,
    "keep": partial(save, keep=True),
    "check": check,
    "full": fail_on_one_rank,
    "die": die_on_one_rank,
}
"""LAYOUT:FOLDER:NAME:WORDS..."""


def act(root: Path, actions: Sequence[str]) -> str:
    """Do it as one rank; return the notes and "ok", or the error that a user would see."""
    notes: list[str] = []
    try:
        with join_world(torch.device("cpu")) as world:
            for action in actions:
                layout, folder, name, *words = action.split(":")
                notes += ACTIONS[name](Run(layout, world), root / folder, *words) or []
    except ModelwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join([*notes, "ok"])
