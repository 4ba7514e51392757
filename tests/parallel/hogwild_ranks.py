"""One process of several that change one vector in shared memory; a script for `test_hogwild`.

hogwild_ranks.py whole FOLDER     `compensated`, then `count`; each rank writes what it saw to FOLDER
hogwild_ranks.py crash FOLDER     the last rank dies by SIGKILL in its third update
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD

from modelwright.core.errors import ModelwrightError
from modelwright.optim.delay import compensate
from modelwright.parallel.mesh import World, join_world
from modelwright.parallel.strategies.hogwild import Hogwild

NUM_UPDATES, FIRST, STOP_AT = 600, 7, 100
STRENGTH = 0.5


def count(world: World, folder: Path) -> None:
    """Numbers from FIRST on; the weight's gradient is -1 at the update's place, so rate 1 adds 1 there."""
    weight = nn.Parameter(torch.zeros(NUM_UPDATES))
    optimizer = SGD([weight], lr=1.0)
    heard, stops = [], []

    def one_step(number: int) -> tuple[int, int]:
        gradient = torch.zeros(NUM_UPDATES)
        gradient[number] = -1.0
        time.sleep(0.0005 * (number % 3))
        weight.grad = gradient
        hogwild.reduce([gradient])
        optimizer.step()
        return number, world.rank

    def wants_to_stop() -> bool:
        return world.rank == 1 and not stops and len(heard) >= STOP_AT

    with Hogwild(world) as hogwild:
        hogwild.begin(optimizer, FIRST)
        while len(heard) < NUM_UPDATES - FIRST:
            first = FIRST + len(heard)
            for report in hogwild.updates(one_step, first, NUM_UPDATES, wants_to_stop):
                heard.append(report)
            stops.append(FIRST + len(heard))
    report = {"heard": heard, "stops": stops, "weight": weight.tolist()}
    (folder / f"count{world.rank}.json").write_text(json.dumps(report))


def crash(world: World) -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = SGD([weight], lr=1.0)
    mine = []

    def one_step(number: int) -> int:
        mine.append(number)
        if world.rank == world.size - 1 and len(mine) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
        weight.grad = torch.zeros(4)
        hogwild.reduce([weight.grad])
        optimizer.step()
        return number

    with Hogwild(world) as hogwild:
        hogwild.begin(optimizer, 0)
        try:
            for _ in hogwild.updates(one_step, 0, 100, lambda: False):
                pass
        except ModelwrightError as error:
            print(error, flush=True)
            os._exit(3)  # the process group cannot be taken down with one of it gone


def compensated(world: World, folder: Path) -> None:
    """Update 1 reads the weights before update 0 changes them and goes on when it has."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = SGD([weight], lr=0.1)
    marks = [folder / "changed", folder / "read"]

    def one_step(number: int) -> tuple[int, list[float], float]:
        if number == 1:
            marks[1].touch()
        while not marks[1 - number].exists():
            time.sleep(0.001)
        weight.grad = 3.0 * weight.detach()
        hogwild.reduce([weight.grad])
        gradient = weight.grad.tolist()
        optimizer.step()
        return number, gradient, hogwild.figures()["staleness"]

    def made() -> bool:
        marks[0].touch()
        return False

    with Hogwild(world, compensate=partial(compensate, strength=STRENGTH)) as hogwild:
        hogwild.begin(optimizer, 0)
        reports = list(hogwild.updates(one_step, 0, 2, made))
    report = {"reports": reports, "weight": weight.tolist()}
    (folder / f"compensated{world.rank}.json").write_text(json.dumps(report))


def main() -> None:
    torch.set_num_threads(1)
    command, folder = sys.argv[1], Path(sys.argv[2])
    with join_world(torch.device("cpu")) as world:
        if command == "crash":
            crash(world)
        else:
            compensated(world, folder)
            count(world, folder)


if __name__ == "__main__":
    main()
