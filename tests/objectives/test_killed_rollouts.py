"""Runs that are killed while they generate, or between the updates of a rollout, resume with the same bits."""

import os
import signal
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


def make(name: str) -> Grpo | Ppo:
    """Rollouts are learned from in two updates, so that the second begins at step 2."""
    if name == "grpo":
        return tiny_rollouts.grpo(num_iterations=2, beta=0.1)
    return tiny_rollouts.ppo(num_ppo_epochs=2, kl_target=1.0, normalize_rewards=True)


def die_while_generating(world: World, folder: Path) -> None:
    """In the second rollout: after the first one and the evaluation at step 2."""
    objective, finished = make("grpo"), [0]

    def count(num_finished: int) -> None:
        finished[0] += 1
        if len(records(folder)) >= 2 and finished[0] % 10 == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    objective.worker = replace(objective.worker, on_step=count)
    tiny_rollouts.train(world, folder, objective)


def die_between_updates(world: World, folder: Path) -> None:
    """In the forward pass of the second epoch of the second rollout."""
    objective, num_updates = make("ppo"), [0]
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


@pytest.mark.parametrize(("name", "killed"), [("grpo", die_while_generating), ("ppo", die_between_updates)])
def test_a_killed_run_resumes_with_the_same_bits(name: str, killed: Any, tmp_path: Path) -> None:
    (ended,) = start_distributed(killed, 1, tmp_path / "cut").wait()
    assert ended.code == -signal.SIGKILL
    assert 2 <= len(records(tmp_path / "cut")) < 4
    resumed = tiny_rollouts.train(single(), tmp_path / "cut", make(name))
    assert "step 0, reward" not in resumed
    assert "step 3, reward" in resumed
    whole = tiny_rollouts.train(single(), tmp_path / "whole", make(name))
    assert all(torch.equal(value, whole[key]) for key, value in resumed.items())
