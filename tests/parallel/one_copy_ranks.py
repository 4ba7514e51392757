"""One process of several that share weights and the work of each update; a script for `test_one_copy`.

one_copy_ranks.py whole FOLDER    each rank writes its weights, states and norms to FOLDER
one_copy_ranks.py within FOLDER   the same, updated in backward on one copy
one_copy_ranks.py copies FOLDER   the same, updated in backward on copies
one_copy_ranks.py full FOLDER     more shared memory than there is
"""

import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from modelwright.parallel.strategies.shared_memory_in_backward import OneCopyInBackward
from modelwright.parallel.strategies.sums_in_backward import SumsInBackward
from safetensors.torch import save_file
from test_one_copy import MAX_NORM, RATES, gradients, parts
from torch import Tensor
from torch.optim import AdamW

from modelwright.core.errors import StorageError
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.grad_norm import joined_norm, parts_norm
from modelwright.parallel.mesh import World, join_world, lay_out
from modelwright.parallel.shared_memory import has_room, shared_file
from modelwright.parallel.strategies.optimizer_in_backward import InBackward
from modelwright.parallel.strategies.shared_memory import OneCopy, fits


def whole(world: World, folder: Path) -> None:
    mesh = lay_out(world, ParallelConfig())
    parameters, optimizer = parts()
    if not world.is_first:
        for parameter in parameters:  # the first one's values count
            parameter.data.zero_()
    assert fits(mesh, parameters)
    norms: list[float] = []
    with OneCopy(mesh) as turns:
        turns.begin(optimizer, 0)
        for number, rate in enumerate(RATES):
            turns.arm(parameters)
            own = gradients(number, world.rank)
            for parameter, gradient in list(zip(parameters, own, strict=True))[number % 2 :]:
                (parameter * gradient).sum().backward()
            for parameter, gradient in zip(parameters, own, strict=True):
                if parameter.grad is None:  # backward does not reach all of them
                    parameter.grad = gradient
            turns.reduce([parameter.grad for parameter in parameters if parameter.grad is not None])
            mine = turns.part([])
            norms.append(parts_norm(mine, world))
            for part in mine:
                part.mul_(min(1.0, MAX_NORM / norms[-1]))
            for group in optimizer.param_groups:
                group["lr"] = rate
            turns.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        shared = [parameter.data_ptr() for parameter in parameters]
    assert all(parameter.data_ptr() != place for parameter, place in zip(parameters, shared, strict=True))
    write(folder / f"{world.rank}.safetensors", parameters, optimizer, norms)


def within(world: World, folder: Path, *, copies: bool) -> None:
    """Buckets of at most 64 elements: four for these parameters."""
    parameters, optimizer = parts()
    names = {parameter: str(number) for number, parameter in enumerate(parameters)}
    norms: list[float] = []
    with ExitStack() as held:
        if copies:
            finals = SumsInBackward(world, bucket_bytes=256)
            updates = InBackward(optimizer, names, finals=finals)
        else:
            finals = held.enter_context(
                OneCopyInBackward(lay_out(world, ParallelConfig()), parameters, bucket_bytes=256)
            )
            of_this_rank = finals.begin(optimizer, 0)
            updates = InBackward(optimizer, names, finals=finals, joined=lambda found: over_ranks(found, world))
            updates.optimizer = of_this_rank
        for number, rate in enumerate(RATES):
            for group in optimizer.param_groups:
                group["lr"] = rate
            updates.arm()
            own = list(zip(parameters, gradients(number, world.rank), strict=True))
            reached = own[(number + world.rank) % 2 :]  # not the same parameters on all ranks
            torch.stack([(parameter * gradient).sum() for parameter, gradient in reached]).sum().backward()
            updates.finish()
            assert all(parameter.grad is None for parameter in parameters)
            norms.append(updates.norm())
    write(folder / f"{world.rank}.safetensors", parameters, optimizer, norms)


def over_ranks(norms: Mapping[Tensor, float], world: World) -> float:
    return joined_norm({1: math.hypot(*norms.values())}, world)


def write(path: Path, parameters: list[Tensor], optimizer: AdamW, norms: list[float]) -> None:
    found: dict[str, Tensor] = {"norms": torch.tensor(norms, dtype=torch.float64)}
    for number, parameter in enumerate(parameters):
        state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
        found |= {f"{number}/weight": parameter.data, **{f"{number}/{key}": value for key, value in state.items()}}
    save_file(found, path)


def full(world: World) -> None:
    assert not has_room(world, 1 << 60)
    try:
        with shared_file(world, 1 << 60):
            pass
    except StorageError as error:
        print(f"refused: {error}")


def main() -> None:
    torch.set_num_threads(1)
    with join_world(torch.device("cpu")) as world:
        if sys.argv[1] == "whole":
            whole(world, Path(sys.argv[2]))
        elif sys.argv[1] in ("within", "copies"):
            within(world, Path(sys.argv[2]), copies=sys.argv[1] == "copies")
        else:
            full(world)


if __name__ == "__main__":
    main()
