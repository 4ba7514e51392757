"""SIGKILL in a run of two processes that has every controller on: the run that goes on ends with the same bits."""

import json
from typing import Any

import pytest
import torch
import wired_run

from distributed import start_distributed
from wired_cases import Runs, case, losses, values, weights

SECONDS = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0}
FOLLOWING = {
    "max_grad_norm": 0.05,
    "adaptive_clip": {"kind": "percentile", "window_steps": 6, "percentile": 50.0},
    "weight_decay_schedule": {"grad_norm_threshold": 1.2, "release_fraction": 0.77},
    "loss_spikes": {"num_sigmas": 8.0, "window_steps": 6},
}
SCALED = {"enabled": "always", "init_scale": 1024.0, "growth_interval": 4}
CHANGING = {
    "kind": "bandit",
    "decide_every_steps": 3,
    "measure_steps": 2,
    "cooldown_decisions": 1,
    "tolerance": 0.5,
    "revert_on_loss_rise": 5.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "formats": {**FOLLOWING, "precision": {"policy": "fp32", "adaptive": CHANGING, "loss_scale": SCALED}},
    "sparse": {
        **FOLLOWING,
        "precision": {"policy": "fp8", "fp8": {"scaling": "delayed", "amax_history_len": 3}, "loss_scale": SCALED},
        "sparse_updates": {"kind": "columns", "keep_fraction": 0.5, "refresh_every_steps": 2},
        "batch_selection": {"signal": "loss_change", "keep_fraction": 0.5, "max_initial_loss": 1.0},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_killed_run_ends_as_one_that_was_left_alone(tmp_path, kind):
    settings = {**SETTINGS[kind], "eval_every_steps": 4, "checkpoint_every_steps": 2}
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
        if kind == "formats":
            known = {f"{part}/{name}": value for part in ("attention", "ffn") for name, value in SECONDS.items()}
            (tmp_path / folder / "formats.json").write_text(json.dumps({**known, "memory": 0.1}))
    die = case("dies", "killed", settings=settings, mishap={"kind": "die", "step": 9, "rank": 1})
    assert start_distributed(wired_run.run_cases, 2, tmp_path, [die]).wait()[1].code == -9
    runs = Runs(tmp_path, [case("whole", settings=settings), case("again", "killed", settings=settings)])
    assert losses(runs, "killed") == losses(runs, "whole")
    for metric in ("clip_norm", "decay_factor", "loss_scale", *(("sparse_share",) if kind == "sparse" else ())):
        assert values(runs, "killed", metric) == values(runs, "whole", metric)
    once, again = weights(runs, "whole"), weights(runs, "again", rank=1)
    assert all(torch.equal(once[name], again[name]) for name in once)
    if kind == "formats":
        changes = [(tmp_path / folder / "formats.jsonl").read_text() for folder in ("whole", "killed")]
        assert changes[0] == changes[1] != ""
