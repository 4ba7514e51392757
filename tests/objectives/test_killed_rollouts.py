"""Runs that are killed while they generate, between the updates of a rollout, or at random moments resume with the same
bits.
"""

import json
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_rollouts
from distributed import start_distributed
from modelwright.objectives.grpo import Grpo
from modelwright.objectives.ppo import Ppo
from modelwright.parallel.mesh import World, single

VALUES = {"ppo": "head", "ppo with a value model": "reward"}


def make(name: str) -> Grpo | Ppo:
    """Rollouts are learned from in two updates, so that the second begins at step 2."""
    if name == "grpo":
        return tiny_rollouts.grpo(num_iterations=2, beta=0.1)
    return tiny_rollouts.ppo(num_ppo_epochs=2, kl_target=1.0, normalize_rewards=True, value_model=VALUES[name])


def die_while_generating(world: World, folder: Path, name: str) -> None:
    """In the second rollout: after the first one and the evaluation at step 2."""
    objective, finished = make(name), [0]

    def count(num_finished: int) -> None:
        finished[0] += 1
        if len(records(folder)) >= 2 and finished[0] % 10 == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    objective.worker = replace(objective.worker, on_step=count)
    tiny_rollouts.train(world, folder, objective)


def die_between_updates(world: World, folder: Path, name: str) -> None:
    """In the forward pass of the second epoch of the second rollout."""
    objective, num_updates = make(name), [0]
    losses = objective.losses

    def count(output: Any, batch: Any, model: Any) -> Any:
        num_updates[0] += output.requires_grad
        if num_updates[0] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses(output, batch, model)

    objective.losses = count
    tiny_rollouts.train(world, folder, objective)


def records(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return [line for line in path.read_text().splitlines() if '"reward"' in line] if path.exists() else []


def die_at(world: World, folder: Path, moment: int) -> None:
    """At the given event since the start: a step of the engine, in a rollout or an evaluation, or a forward pass."""
    objective, num_events = make("ppo"), [0]
    losses = objective.losses

    def count(*args: Any) -> None:
        num_events[0] += 1
        if num_events[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_losses(output: Any, batch: Any, model: Any) -> Any:
        count()
        return losses(output, batch, model)

    objective.losses = counted_losses
    objective.worker = replace(objective.worker, on_step=count)
    objective.heldout = replace(objective.heldout, worker=replace(objective.heldout.worker, on_step=count))
    tiny_rollouts.train(world, folder, objective)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Runs that nothing interrupted, by name: their folders and what they learned."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("grpo", *VALUES)}
    return {name: (folder, tiny_rollouts.train(single(), folder, make(name))) for name, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "killed"), [("grpo", die_while_generating), *((name, die_between_updates) for name in VALUES)]
)
def test_a_killed_run_resumes_with_the_same_bits(
    name: str, killed: Any, whole: Mapping[str, Any], tmp_path: Path
) -> None:
    (ended,) = start_distributed(killed, 1, tmp_path, name).wait()
    assert ended.code == -signal.SIGKILL
    assert 2 <= len(records(tmp_path)) < 4
    resumed = tiny_rollouts.train(single(), tmp_path, make(name))
    assert "step 0, reward" not in resumed
    assert "step 3, reward" in resumed
    assert all(torch.equal(value, whole[name][1][key]) for key, value in resumed.items())


@pytest.mark.slow
def test_a_run_killed_again_and_again_at_random_moments_ends_with_the_same_bits(
    whole: Mapping[str, Any], tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    dice, num_killed = random.Random(seed), 0
    for _ in range(3):
        (ended,) = start_distributed(die_at, 1, tmp_path, dice.randint(2, 60)).wait()
        num_killed += ended.code == -signal.SIGKILL
    assert num_killed, f"seed {seed}"
    resumed, (folder, expected) = tiny_rollouts.train(single(), tmp_path, make("ppo")), whole["ppo"]
    assert all(torch.equal(value, expected[key]) for key, value in resumed.items()), f"seed {seed}"
    assert "norm.weight" in resumed
    # What evaluations are compared with outlives the process, too.
    assert win_rates(tmp_path) == win_rates(folder), f"seed {seed}"


def win_rates(folder: Path) -> dict[int, float]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    name = "heldout/rewards/even/win_rate"
    return {one["step"]: one[name] for one in found if name in one}
