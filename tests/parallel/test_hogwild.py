"""Processes that share weights: each number drawn once, few updates lost, meetings, and a process that dies."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from modelwright.core.errors import ConfigError
from modelwright.parallel.mesh import single
from modelwright.parallel.shared_memory import share
from modelwright.parallel.strategies.hogwild import Hogwild
from modelwright.parallel.strategies.hogwild_counters import SLOT_BYTES, SLOTS
from rank_processes import run_ranks, start_ranks, wait_for

SCRIPT = Path(__file__).with_name("hogwild_ranks.py")
NUM_UPDATES, FIRST, STOP_AT = 600, 7, 100


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hogwild")
    before = shared_files()
    run_ranks(SCRIPT, "whole", folder, size=2)
    assert shared_files() == before
    return folder


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("modelwright-")}


def reports(folder: Path, name: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}*.json"))]


def test_every_number_is_drawn_once_and_heard_of_in_order_by_all(two_ranks):
    first, second = reports(two_ranks, "count")
    assert [number for number, _ in first["heard"]] == list(range(FIRST, NUM_UPDATES))
    assert first["heard"] == second["heard"]
    by_rank = [sum(rank == worker for _, worker in first["heard"]) for rank in range(2)]
    assert min(by_rank) > 5


def test_all_stop_where_one_asked_for_it_and_go_on_from_there(two_ranks):
    first, second = reports(two_ranks, "count")
    assert first["stops"] == second["stops"]
    assert FIRST + STOP_AT < first["stops"][0] < FIRST + SLOTS
    assert first["stops"][-1] == NUM_UPDATES


def test_updates_reach_the_shared_weights_once(two_ranks):
    """A process that wrote its own copy back would lose the others' changes: about half of all."""
    first, second = (torch.tensor(report["weight"]) for report in reports(two_ranks, "count"))
    assert torch.equal(first, second)
    assert torch.equal(first[:FIRST], torch.zeros(FIRST))
    assert first.max() == 1.0
    assert first[FIRST:].mean() > 0.97


def test_a_late_gradient_is_compensated_for_what_happened_meanwhile(two_ranks):
    first, second = reports(two_ranks, "compensated")
    assert first == second
    then = torch.tensor([1.0, -2.0])
    now = then - 0.1 * 3 * then
    late = 3 * then + 0.5 * (3 * then) ** 2 * (now - then)
    (_, fresh, no_delay), (_, compensated, delay) = first["reports"]
    assert (no_delay, delay) == (0, 1)
    torch.testing.assert_close(torch.tensor(fresh), 3 * then)
    torch.testing.assert_close(torch.tensor(compensated), late)
    torch.testing.assert_close(torch.tensor(first["weight"]), now - 0.1 * late)


def test_a_process_that_is_killed_is_noticed_and_named(tmp_path):
    (survivor, said, _), (victim, _, _) = wait_for(start_ranks(SCRIPT, "crash", tmp_path, size=2))
    assert victim == -9
    assert survivor == 3
    assert "has ended (rank 1)" in said
    assert "run the same command again" in said


def train(optimizer: torch.optim.Optimizer, model: nn.Module, hogwild: Hogwild | None, steps: range) -> None:
    """Plain training, as updates of the only process where `hogwild` is given."""

    def one_step(number: int) -> int:
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        model(inputs).square().sum().backward()
        if hogwild is not None:
            hogwild.reduce([])
        optimizer.step()
        optimizer.zero_grad()
        return number

    if hogwild is None:
        made = [one_step(number) for number in steps]
    else:
        made = list(hogwild.updates(one_step, steps.start, steps.stop, lambda: False))
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
    with Hogwild(single()) as hogwild:
        hogwild.begin(optimizer, first)
        train(optimizer, shared, hogwild, range(first, 5))
        train(optimizer, shared, hogwild, range(5, 9))
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in plain.state[one].items():
            assert torch.equal(value, optimizer.state[other][key]), key


def test_a_report_too_long_for_its_slot_is_refused():
    with Hogwild(single()) as hogwild:
        hogwild.begin(SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 0)
        with pytest.raises(ValueError, match="there is room for"):
            list(hogwild.updates(lambda number: "x" * SLOT_BYTES, 0, 1, lambda: False))


def test_weights_elsewhere_than_in_host_memory_are_refused():
    with pytest.raises(ConfigError, match=r"^device: weights are shared in host memory"):
        share(single(), [torch.zeros(2, device="meta")])
