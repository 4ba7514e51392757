"""Alignment objectives under every layout, and killed in the middle of an epoch: the same figures and weights."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

import preference_rows
from distributed import run_distributed, start_distributed
from modelwright.data.rows.loader import PackedRows
from modelwright.objectives.preference import (
    Kto,
    KtoConfig,
    Preference,
    PreferenceConfig,
    RewardModelConfig,
    RewardModeling,
)
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.frozen_model import row_losses
from modelwright.train.objective import Objective, forward
from modelwright.train.technique import StepInfo, Technique

FAMILIES = ("dpo", "kto", "reward")
LAYOUTS = {name: tiny_run.TWO_RANK_LAYOUTS[name] for name in ("copies", "zero 3", "tensor", "pipeline")}
SETTINGS = {
    "num_steps": 3,
    "gradient_accumulation_steps": 2,
    "eval_every_steps": 3,
    "checkpoint_every_steps": 1,
    "keep_best": False,
}
DIES_AFTER = 2
CENTERED = {"center_rewards_coefficient": 0.1, "use_margins": True}


def objective_of(family: str, folder: Path, dtype: torch.dtype, world: World, *, sharded: bool) -> Objective:
    groups = preference_rows.labeled(44) if family == "kto" else preference_rows.pairs(44)
    source = preference_rows.loader(folder, groups)
    assert source.num_batches_per_epoch > DIES_AFTER
    if family == "reward":
        return RewardModeling(source, RewardModelConfig(**CENTERED))
    reference = preference_rows.reference_model(dtype, world, sharded=sharded)
    return Kto(source, KtoConfig(), reference) if family == "kto" else Preference(source, PreferenceConfig(), reference)


def trained(
    family: str,
    folder: Path,
    *further: Any,
    world: World | None = None,
    layout: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """The final weights, and the metrics of each record as `step, name`."""
    torch.set_num_threads(1)
    world, model = world or single(), preference_rows.other_model(8, dtype)
    rows = folder.with_name(f"{folder.name}-rows-{world.rank}")
    sharded = layout is not None and layout != LAYOUTS["copies"]
    objective = objective_of(family, rows, dtype, world, sharded=sharded)
    heldout = list(PackedRows(rows).batches(2))[:4]
    tiny_run.run(
        folder, tiny_run.settings(**SETTINGS), model=model, objective=objective, heldout=heldout, world=world,
        techniques=list(further), parallel=ParallelConfig(**(layout or {})),
    )  # fmt: skip
    found = {name: weight.clone() for name, weight in model.state_dict().items()}
    names = ("loss", "heldout_loss", *(f"{part}{name}" for part in ("", "heldout/") for name in objective.metric_names))
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in names:
            if name in record:
                found[f"{record['step']}, {name}"] = torch.tensor(record[name], dtype=torch.float64)
    return found


def in_all_layouts(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    return {
        f"{family}, {name}": trained(family, folder / family / name, world=world, layout=layout)
        for family in FAMILIES
        for name, layout in LAYOUTS.items()
    }


@pytest.mark.slow
def test_every_layout_gives_the_weights_and_metrics_of_one_process(tmp_path: Path) -> None:
    first, second = run_distributed(in_all_layouts, 2, tmp_path)
    for family in FAMILIES:
        alone = trained(family, tmp_path / f"{family} alone")
        assert float(alone["3, loss"]) != float(alone["1, loss"])
        for name in LAYOUTS:
            for found in (first[f"{family}, {name}"], second[f"{family}, {name}"]):
                assert found.keys() == alone.keys()
                for key, value in found.items():
                    torch.testing.assert_close(
                        value,
                        alone[key],
                        rtol=1e-7,
                        atol=1e-9,
                        msg=lambda text, at=f"{family}, {name}, {key}": at + text,
                    )


def killed(world: World, folder: Path) -> None:
    """Dies in the middle of an epoch of the family that the folder is named after."""

    def die(info: StepInfo) -> None:
        if info.step == DIES_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)

    death = tiny_run.always(Technique(name="death", on_step_end=die, needs=frozenset()))
    trained(folder.name, folder, death, world=world, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dpo", "kto", "reward"])
def test_a_killed_run_resumes_with_the_same_bits(family: str, tmp_path: Path) -> None:
    (ended,) = start_distributed(killed, 1, tmp_path / "cut" / family).wait()
    assert ended.code == -signal.SIGKILL
    whole = trained(family, tmp_path / "whole" / family, dtype=torch.float32)
    resumed = trained(family, tmp_path / "cut" / family, dtype=torch.float32)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(value, whole[key]) for key, value in resumed.items())


def test_the_loss_of_a_group_is_the_mean_over_its_labels(tmp_path: Path) -> None:
    """For a curriculum by loss: one value for each group, whatever the number of pairs in it."""
    rows = preference_rows.packed(tmp_path, preference_rows.pairs(10))
    model = preference_rows.other_model(8, torch.float32)
    losses = row_losses(model, rows, torch.device("cpu"))
    assert len(losses) == rows.num_groups < rows.num_rows
    for group, loss in enumerate(losses.tolist()):
        batch = rows.gather(torch.tensor([group]).numpy())
        with torch.no_grad():
            log_probs_BT = model.token_log_probs(forward(model, batch), batch.labels_BT)
        assert loss == pytest.approx(-float(log_probs_BT.sum()) / batch.num_targets, rel=1e-5)
