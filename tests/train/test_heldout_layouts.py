"""A held-out figure is the same in every layout, also where it does not depend on the token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

import tiny_rollouts
from distributed import run_distributed
from modelwright.core.records import column, read_records
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.objective import Objective, Terms

LAYOUTS: dict[str, dict[str, Any]] = {
    "context": {"context": 2},
    "ring": {"context": 2, "context_attention": "ring"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "copies": {},
}


@dataclass(frozen=True)
class OfBatches(NextToken):
    """Next tokens, and a held-out term that is one number for the whole batch, as the reward of a rollout is."""

    metric_names = ("batches",)

    def weights(self, batch):
        return {**super().weights(batch), "batches": torch.tensor(1.0)}

    def losses(self, output, batch, model):
        number = torch.tensor(3.0)
        terms = super().losses(output, batch, model).losses
        own = 0.0 * output.sum() if output.requires_grad else number
        return Terms({**terms, "batches": own}, {"batches": (number, torch.tensor(1.0))})


OBJECTIVES: dict[str, Callable[[World], Objective]] = {
    "tokens": lambda world: NextToken(tiny_run.Rows()),
    "batches": lambda world: OfBatches(tiny_run.Rows()),
    "grpo": lambda world: tiny_rollouts.grpo(world, dtype=torch.float64),
    "ppo": lambda world: tiny_rollouts.ppo(world, dtype=torch.float64),
}


def heldout_figures(world: World, folder: Path, parallel: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The held-out figures of one evaluation by objective."""
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}
    for name, make in OBJECTIVES.items():
        rolls_out = name in ("grpo", "ppo")
        model = tiny_rollouts.model(torch.float64) if rolls_out else tiny_run.tiny_model(torch.float64)
        changes = {"num_steps": 1, "eval_every_steps": 1, "checkpoint_every_steps": 0, "weight_decay": 0.0}
        several = {"gradient_accumulation_steps": 2} if "pipeline" in parallel else {}
        heldout = {"heldout": tiny_rollouts.heldout_rows()} if rolls_out else {}
        result = tiny_run.run(
            folder / name,
            tiny_run.settings(**changes, **several),
            model=model,
            objective=make(world),
            world=world,
            parallel=ParallelConfig(**parallel),
            **heldout,
        )
        figures[name] = {"loss": result.heldout_loss, "best": result.best.loss, **result.heldout_metrics}
        if world.is_first:
            assert [value for _, value in column(read_records(folder / name / "metrics.jsonl"), "heldout_loss")]
    return figures


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return heldout_figures(single(), tmp_path_factory.mktemp("alone"), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_measure_what_one_does(name: str, alone: dict[str, dict[str, float]], tmp_path: Path) -> None:
    for figures in run_distributed(heldout_figures, 2, tmp_path, LAYOUTS[name]):
        for objective, expected in alone.items():
            assert figures[objective] == pytest.approx(expected, rel=1e-6), objective
    assert alone["batches"]["loss"] > 3.0
    assert -1.0 <= alone["grpo"]["loss"] < 0.0
