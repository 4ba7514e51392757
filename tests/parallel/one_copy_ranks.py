"""One process of several that share weights and the work of each update; a script for `test_one_copy`.

one_copy_ranks.py whole FOLDER    each rank writes its weights, states and norms to FOLDER
one_copy_ranks.py full FOLDER     more shared memory than there is
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from test_one_copy import MAX_NORM, RATES, gradients, parts
from torch import Tensor

from modelwright.core.errors import StorageError
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.gradients import parts_norm
from modelwright.parallel.mesh import World, join_world, lay_out
from modelwright.parallel.one_copy import OneCopy, fits
from modelwright.parallel.shared_memory import has_room, shared_file


def whole(world: World, folder: Path) -> None:
    mesh = lay_out(world, ParallelConfig())
    parameters, optimizer = parts()
    if not world.is_first:
        for parameter in parameters:  # the first one's values count
            parameter.data.zero_()
    assert fits(mesh, parameters)
    norms = []
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
    found: dict[str, Tensor] = {"norms": torch.tensor(norms, dtype=torch.float64)}
    for number, parameter in enumerate(parameters):
        state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
        found |= {f"{number}/weight": parameter.data, **{f"{number}/{key}": value for key, value in state.items()}}
    save_file(found, folder / f"{world.rank}.safetensors")


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
        else:
            full(world)


if __name__ == "__main__":
    main()
