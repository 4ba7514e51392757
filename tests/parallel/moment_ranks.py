"""One rank of the tests of shared moments: `moment_ranks.py FOLDER`, in the world that the environment describes.

Writes the second moments before and after each sharing, what all agreed on and the bytes, to
`FOLDER/<case>-<rank>.safetensors`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from modelwright.core.config import parse
from modelwright.parallel.mesh import World, join_world
from modelwright.parallel.strategies.config import TransportConfig, build_transport
from modelwright.parallel.strategies.local_sgd import LocalSteps
from modelwright.parallel.strategies.second_moment_sync import SharedMoment

SHAPES = ((120, 70), (37,), (4, 3, 5))
ROUNDS = 4
OCTAVES = 0.5
NUM_STEPS = 9
RECIPE = {
    "kind": "three_level",
    "three_level": {"keep": 0.3, "selection": "global", "values": "means"},
    "local_steps": {"every": 2, "keep_own": True, "moment_every": 2, "moment_octaves": OCTAVES},
}


def moments(rank: int, round_: int) -> list[torch.Tensor]:
    """Squares over many magnitudes, some exactly zero; ranks and rounds are alike but not equal."""
    common, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(1000 + 10 * rank + round_)
    found = []
    for shape in SHAPES:
        size = torch.exp2(torch.randn(shape, generator=common) * 8 - 20)
        found.append(size * torch.rand(shape, generator=own) * (torch.rand(shape, generator=common) > 0.1))
    return found


def shared(world: World) -> dict[str, torch.Tensor]:
    ours, found = SharedMoment(world, octaves=OCTAVES), {}
    for round_ in range(ROUNDS):
        parts = moments(world.rank, round_)
        ours.share(parts)
        found |= {f"{round_}/moment/{i}": part for i, part in enumerate(parts)}
        found |= {f"{round_}/agreed/{i}": part.clone() for i, part in enumerate(ours.agreed)}
        found[f"{round_}/bytes"] = torch.tensor(ours.bytes_sent)
    bad = moments(world.rank, ROUNDS)
    if world.rank == world.size - 1:
        bad[1][3] = torch.inf
    ours.share(bad)
    return found | {f"bad/{i}": part for i, part in enumerate(bad)}


class Adam:
    """Weights that each rank moves by gradients of its own, as Adam does, through the recipe's local steps."""

    def __init__(self, world: World) -> None:
        draw = torch.Generator().manual_seed(7)
        self.weights = [torch.randn(shape, generator=draw) for shape in SHAPES]
        self.moments = {name: [torch.zeros(shape) for shape in SHAPES] for name in ("exp_avg", "exp_avg_sq")}
        transport = build_transport(parse(TransportConfig, RECIPE), world)
        assert isinstance(transport, LocalSteps)
        self.steps, self.rank = transport, world.rank

    def begin(self) -> None:
        self.steps.begin(self.weights, num_steps=NUM_STEPS, private=lambda: self.moments, restore=self.restore)

    def restore(self, private: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for name, values in private.items():
            for moment, value in zip(self.moments[name], values, strict=True):
                moment.copy_(value)

    def go(self, first: int, last: int) -> None:
        for step in range(first, last):
            draw = torch.Generator().manual_seed(100 * self.rank + step)
            for weight, mean, square in zip(self.weights, *self.moments.values(), strict=True):
                gradient = torch.randn(weight.shape, generator=draw) ** 3
                mean.lerp_(gradient, 0.1)
                square.lerp_(gradient.square(), 0.05)
                weight.sub_(0.1 * mean / (square.sqrt() + 1e-8))
            self.steps.after_update(self.weights, step + 1)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        found = {f"{name}/weight/{i}": weight.clone() for i, weight in enumerate(self.weights)}
        return found | {f"{name}/square/{i}": part.clone() for i, part in enumerate(self.moments["exp_avg_sq"])}


def copied(tree):
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def recipe(world: World) -> dict[str, torch.Tensor]:
    """The whole way, and the same with a checkpoint after step 5, between two meetings and after one sharing."""
    whole, found = Adam(world), {}
    whole.begin()
    for last in range(1, NUM_STEPS + 1):
        whole.go(last - 1, last)
        found |= whole.tensors(str(last))
    half, again = Adam(world), Adam(world)
    half.begin()
    half.go(0, 5)
    again.steps.load_state_dict(copied(half.steps.state_dict()))
    again.begin()
    again.go(5, NUM_STEPS)
    return found | again.tensors("again") | {"bytes": torch.tensor(whole.steps.bytes_sent)}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with join_world(torch.device("cpu")) as world:
        for name, case in {"shared": shared, "recipe": recipe}.items():
            save_file(case(world), folder / f"{name}-{world.rank}.safetensors")


if __name__ == "__main__":
    main()
