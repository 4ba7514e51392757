"""One rank of the transport tests: `transport_job.py FOLDER`, in the world that the environment describes.

Every case reduces the same gradients for some rounds and writes what came out, what is kept and what was sent to
`FOLDER/<case>-<rank>.safetensors`; the test compares them with sums of its own.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from modelwright.core.config import parse
from modelwright.parallel.gradient_sync import GradientTransport
from modelwright.parallel.mesh import World, join_world
from modelwright.parallel.strategies.config import TransportConfig, build_transport
from modelwright.parallel.strategies.local_sgd import LocalSteps

SHAPES = ((120, 70), (37,), (), (4, 3, 5), (65, 80), (1,))
ROUNDS = 6
CASES = {
    "exact": {},
    "bf16": {"kind": "bf16"},
    "int8": {"kind": "int8"},
    "powersgd": {"kind": "powersgd", "powersgd_rank": 4},
    "one_percent": {"kind": "three_level", "three_level": {"keep": 0.01}},
    "global": {"kind": "three_level", "three_level": {"keep": 0.05, "selection": "global", "bucket_numel": 1000}},
    "warm": {"kind": "three_level", "three_level": {"keep": 0.01, "warmup_keep": 0.5, "warmup_messages": 4}},
    "momentum": {"kind": "three_level", "three_level": {"keep": 0.1, "momentum": 0.9}},
    "all_kept": {"kind": "three_level", "three_level": {"keep": 1.0, "min_bits": 16}},
}


def gradients(rank: int, round_: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of one rank in one round; magnitudes differ much within a tensor, as those of gradients do."""
    draw = torch.Generator().manual_seed(100 * rank + round_)
    return [torch.randn(shape, generator=draw, dtype=dtype) ** 3 for shape in SHAPES]


def build(case: dict, world: World) -> GradientTransport:
    return build_transport(parse(TransportConfig, case), world)


def rounds(transport: GradientTransport, rank: int, first: int, last: int) -> dict[str, torch.Tensor]:
    """Reduce; results, residuals and bytes of each round."""
    found = {}
    for round_ in range(first, last):
        parts = gradients(rank, round_)
        transport.reduce(parts)
        found |= {f"result/{round_}/{i}": part.clone() for i, part in enumerate(parts)}
        kept = transport.state_dict().get("residuals", [])
        found |= {f"residual/{round_}/{i}": part.clone() for i, part in enumerate(kept)}
        found[f"bytes/{round_}"] = torch.tensor(transport.bytes_sent)
    return found


def resumed(case: dict, world: World) -> dict[str, torch.Tensor]:
    """The second half of the rounds by a transport that was given the state of another one."""
    old, new = build(case, world), build(case, world)
    rounds(old, world.rank, 0, ROUNDS // 2)
    new.load_state_dict(copied(old.state_dict()))
    return rounds(new, world.rank, ROUNDS // 2, ROUNDS)


def copied(tree):
    """A state after its way through a checkpoint: other storage, tuples as lists, numbers through JSON."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, (list, tuple)) else json.loads(json.dumps(tree))


def after_a_nan(case: dict, world: World) -> dict[str, torch.Tensor]:
    """Rounds of which the third has one nan on the last rank; the others are as if it had not been."""
    transport = build(case, world)
    found = rounds(transport, world.rank, 0, 2)
    bad = gradients(world.rank, 50)
    if world.rank == world.size - 1:
        bad[0][3, 4] = torch.nan
    transport.reduce(bad)
    assert not all(bool(part.isfinite().all()) for part in bad), "all ranks must hear of the nan"
    return found | rounds(transport, world.rank, 2, ROUNDS)


class Walk:
    """Training without a model: weights that each rank moves by its own amounts, and a moment beside each."""

    def __init__(self, world: World, *, codec: dict | None = None, **local: object) -> None:
        draw = torch.Generator().manual_seed(7)
        self.weights = [torch.randn(shape, generator=draw) for shape in SHAPES]
        self.moments = [torch.zeros(shape) for shape in SHAPES]
        transport = build({**(codec or {}), "local_steps": {"every": 3, **local}}, world)
        assert isinstance(transport, LocalSteps)
        self.steps, self.rank = transport, world.rank

    def begin(self) -> None:
        self.steps.begin(self.weights, num_steps=8, private=lambda: {"moment": self.moments}, restore=self.restore)

    def restore(self, private: Mapping[str, Sequence[torch.Tensor]]) -> None:
        for moment, value in zip(self.moments, private["moment"], strict=True):
            moment.copy_(value)

    def step_once(self, step: int) -> None:
        for weight, moment, part in zip(self.weights, self.moments, gradients(self.rank, step), strict=True):
            moment.mul_(0.9).add_(part)
            weight.sub_(moment, alpha=0.1)

    def go(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.step_once(step)
            self.steps.after_update(self.weights, step + 1)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        found = {f"{name}/weight/{i}": weight.clone() for i, weight in enumerate(self.weights)}
        return found | {f"{name}/moment/{i}": moment.clone() for i, moment in enumerate(self.moments)}


def walks(world: World) -> dict[str, torch.Tensor]:
    found = {}
    sparse = {"codec": CASES["warm"], "keep_own": True, "every": 2}
    for name, local in {"mean": {}, "nesterov": {"rate": 0.7, "momentum": 0.8}, "keep_own": sparse}.items():
        whole = Walk(world, **local)
        whole.begin()
        for last in range(1, 9):
            whole.go(last - 1, last)
            found |= whole.tensors(f"{name}/{last}")
        found[f"{name}/bytes"] = torch.tensor(whole.steps.bytes_sent)
        half, again = Walk(world, **local), Walk(world, **local)
        half.begin()
        half.go(0, 5)
        state = copied(half.steps.state_dict())
        found |= {f"{name}/state/{i}": part for i, part in enumerate(state["weights"])}
        found |= {f"{name}/start/{i}": part for i, part in enumerate(state["shared"]["start"])}
        found |= {f"{name}/private/{i}": part for i, part in enumerate(state["private"]["moment"])}
        again.steps.load_state_dict(state)
        again.begin()
        again.go(5, 8)
        found |= again.tensors(f"{name}/again")
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with join_world(torch.device("cpu")) as world:
        for name, case in CASES.items():
            transport = build(case, world)
            found = rounds(transport, world.rank, 0, ROUNDS)
            found |= {f"resumed/{key}": value for key, value in resumed(case, world).items()}
            found |= {f"nan/{key}": value for key, value in after_a_nan(case, world).items()}
            save_file(found, folder / f"{name}-{world.rank}.safetensors")
        save_file(walks(world), folder / f"walks-{world.rank}.safetensors")


if __name__ == "__main__":
    main()
