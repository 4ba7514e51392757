"""Processes that share weights: each number drawn once, few updates lost, meetings, and a process that dies."""

import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from distributed import run_distributed, start_distributed
from modelwright.core.config import ModelwrightError
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh, single
from modelwright.parallel.strategies.hogwild import SLOT_BYTES, SLOTS, Hogwild
from modelwright.parallel.strategies.shared_memory import share
from modelwright.parallel.strategy import Replica
from modelwright.train.optim.build import compensate
from refusals import config_error

NUM_UPDATES, FIRST, STOP_AT = 600, 7, 100


STRENGTH = 0.5
STOPPED = 3
"""Exit code of a rank that noticed that another one has died."""


def keep(gradients: list[torch.Tensor]) -> None:
    """Gradients are not scaled."""


def hogwild_of(model: nn.Module | nn.Parameter, optimizer: torch.optim.Optimizer, world: World, **more: Any) -> Hogwild:
    module = model if isinstance(model, nn.Module) else nn.ParameterList([model])
    alone = build_mesh(single(), ParallelConfig())
    return Hogwild(Replica(mesh=alone, model=module, optimizer=optimizer), world, **more)


def count(world: World) -> dict[str, Any]:
    """Numbers from FIRST on; the weight's gradient is -1 at the update's place, so rate 1 adds 1 there."""
    weight = nn.Parameter(torch.zeros(NUM_UPDATES))
    optimizer = SGD([weight], lr=1.0)
    heard, stops = [], []

    def one_step(number: int) -> tuple[int, int]:
        gradient = torch.zeros(NUM_UPDATES)
        gradient[number] = -1.0
        time.sleep(0.0005 * (number % 3))
        weight.grad = gradient
        hogwild.reduce_gradients(keep)
        hogwild.optimizer_step()
        return number, world.rank

    def wants_to_stop() -> bool:
        return world.rank == 1 and not stops and len(heard) >= STOP_AT

    with closing(hogwild_of(weight, optimizer, world)) as hogwild:
        hogwild.begin(FIRST, NUM_UPDATES)
        while len(heard) < NUM_UPDATES - FIRST:
            first = FIRST + len(heard)
            for report in hogwild.steps(one_step, first, NUM_UPDATES, wants_to_stop):
                heard.append(report)
            stops.append(FIRST + len(heard))
    return {"heard": heard, "stops": stops, "weight": weight.detach()}


def crash(world: World) -> None:
    """The last rank dies by SIGKILL in its third update."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = SGD([weight], lr=1.0)
    mine = []

    def one_step(number: int) -> int:
        mine.append(number)
        if world.rank == world.size - 1 and len(mine) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
        weight.grad = torch.zeros(4)
        hogwild.reduce_gradients(keep)
        hogwild.optimizer_step()
        return number

    with closing(hogwild_of(weight, optimizer, world)) as hogwild:
        hogwild.begin(0, 100)
        try:
            for _ in hogwild.steps(one_step, 0, 100, lambda: False):
                pass
        except ModelwrightError as error:
            print(error, flush=True)
            os._exit(STOPPED)  # the process group cannot be taken down with one of it gone


def compensated(world: World, folder: Path) -> dict[str, Any]:
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
        hogwild.reduce_gradients(keep)
        gradient = weight.grad.tolist()
        hogwild.optimizer_step()
        return number, gradient, hogwild.metrics()["staleness"]

    def made() -> bool:
        marks[0].touch()
        return False

    corrected = partial(compensate, strength=STRENGTH)
    with closing(hogwild_of(weight, optimizer, world, compensate=corrected)) as hogwild:
        hogwild.begin(0, 2)
        reports = list(hogwild.steps(one_step, 0, 2, made))
    return {"reports": reports, "weight": weight.detach()}


def compensate_and_count(world: World, folder: Path) -> dict[str, dict[str, Any]]:
    return {"compensated": compensated(world, folder), "count": count(world)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    before = shared_files()
    results = run_distributed(compensate_and_count, 2, tmp_path_factory.mktemp("hogwild"))
    assert shared_files() == before
    return results


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("modelwright-")}


def test_every_number_is_drawn_once_and_heard_of_in_order_by_all(two_ranks):
    first, second = (rank["count"] for rank in two_ranks)
    assert [number for number, _ in first["heard"]] == list(range(FIRST, NUM_UPDATES))
    assert first["heard"] == second["heard"]
    by_rank = [sum(rank == worker for _, worker in first["heard"]) for rank in range(2)]
    assert min(by_rank) > 5


def test_all_stop_where_one_asked_for_it_and_go_on_from_there(two_ranks):
    first, second = (rank["count"] for rank in two_ranks)
    assert first["stops"] == second["stops"]
    assert FIRST + STOP_AT < first["stops"][0] < FIRST + SLOTS
    assert first["stops"][-1] == NUM_UPDATES


def test_updates_reach_the_shared_weights_once(two_ranks):
    """A process that wrote its own copy back would lose the others' changes: about half of all."""
    first, second = (rank["count"]["weight"] for rank in two_ranks)
    assert torch.equal(first, second)
    assert torch.equal(first[:FIRST], torch.zeros(FIRST))
    assert first.max() == 1.0
    assert first[FIRST:].mean() > 0.97


def test_a_late_gradient_is_compensated_for_what_happened_meanwhile(two_ranks):
    first, second = (rank["compensated"] for rank in two_ranks)
    assert first["reports"] == second["reports"]
    assert torch.equal(first["weight"], second["weight"])
    then = torch.tensor([1.0, -2.0])
    now = then - 0.1 * 3 * then
    late = 3 * then + 0.5 * (3 * then) ** 2 * (now - then)
    (_, fresh, no_delay), (_, compensated, delay) = first["reports"]
    assert (no_delay, delay) == (0, 1)
    torch.testing.assert_close(torch.tensor(fresh), 3 * then)
    torch.testing.assert_close(torch.tensor(compensated), late)
    torch.testing.assert_close(first["weight"], now - 0.1 * late)


def test_a_process_that_is_killed_is_noticed_and_named():
    survivor, victim = start_distributed(crash, 2).wait()
    assert victim.code == -signal.SIGKILL
    assert survivor.code == STOPPED
    assert "has ended (rank 1)" in survivor.output
    assert "run the same command again" in survivor.output


def train(optimizer: torch.optim.Optimizer, model: nn.Module, hogwild: Hogwild | None, steps: range) -> None:
    """Plain training, as updates of the only process where `hogwild` is given."""

    def one_step(number: int) -> int:
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        model(inputs).square().sum().backward()
        if hogwild is not None:
            hogwild.reduce_gradients(keep)
        optimizer.step()
        optimizer.zero_grad()
        return number

    if hogwild is None:
        made = [one_step(number) for number in steps]
    else:
        made = list(hogwild.steps(one_step, steps.start, steps.stop, lambda: False))
    assert made == list(steps)


@pytest.mark.parametrize("first", [0, 3])
def test_one_process_alone_is_the_synchronous_run_bit_for_bit(first):
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
        train(optimizer, model, None, range(first))
        return model, optimizer

    (alone, plain), (shared, optimizer) = parts(), parts()
    train(plain, alone, None, range(first, 9))
    with closing(hogwild_of(shared, optimizer, single())) as hogwild:
        hogwild.begin(first, 9)
        train(optimizer, shared, hogwild, range(first, 5))
        train(optimizer, shared, hogwild, range(5, 9))
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in plain.state[one].items():
            assert torch.equal(value, optimizer.state[other][key]), key


def test_a_report_too_long_for_its_slot_is_refused():
    weight = nn.Parameter(torch.zeros(1))
    with closing(hogwild_of(weight, SGD([weight], lr=1.0), single())) as hogwild:
        hogwild.begin(0, 1)
        with pytest.raises(ValueError, match="the limit is"):
            list(hogwild.steps(lambda number: "x" * SLOT_BYTES, 0, 1, lambda: False))


def test_weights_elsewhere_than_in_host_memory_are_refused():
    with config_error("device"):
        share(single(), [torch.zeros(2, device="meta")])
