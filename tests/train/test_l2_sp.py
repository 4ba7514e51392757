"""L2-SP against its formula, under every layout that it allows, and after a stop."""

from pathlib import Path

import pytest
import tiny_run
import torch
from torch import Tensor

from distributed import run_distributed
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import Stopped
from modelwright.parallel.mesh import ParallelConfig, World
from refusals import config_error

PULL = 2.0
SHORT = {"num_steps": 4, "checkpoint_every_steps": 2, "eval_every_steps": 0, "keep_best": False, "l2_sp": PULL}


def trained(folder: Path, **more) -> dict[str, Tensor]:
    config = tiny_run.settings(**{**SHORT, **more.pop("settings", {})})
    return tiny_run.run_in_float64(folder, config, heldout=[], **more).state_dict()


def test_one_update_is_that_of_the_optimizer_and_a_pull(tmp_path: Path) -> None:
    """The first of two updates begins at the start, so that the second is pulled by what the first has moved."""
    start = {name: tensor.double() for name, tensor in tiny_run.tiny_model().state_dict().items()}
    constant = {"schedule": {"kind": "constant", "warmup_fraction": 0.0}, "checkpoint_every_steps": 0, "num_steps": 1}
    plain = trained(tmp_path / "plain", settings={**constant, "l2_sp": 0.0})
    pulled = trained(tmp_path / "pulled", settings=constant)
    rate = tiny_run.SETTINGS["learning_rate"]
    for name, tensor in plain.items():
        expected = tensor + rate * PULL * (start[name] - tensor)
        torch.testing.assert_close(pulled[name], expected, rtol=1e-12, atol=1e-14)
        assert not torch.equal(pulled[name], tensor)


def in_all_layouts(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    return {
        name: trained(folder / name, world=world, parallel=ParallelConfig(**layout))
        for name, layout in tiny_run.TWO_RANK_LAYOUTS.items()
    }


def test_every_layout_pulls_alike(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone")
    for found in run_distributed(in_all_layouts, 2, tmp_path):
        assert found.keys() == tiny_run.TWO_RANK_LAYOUTS.keys()
        for name, weights in found.items():
            for key, tensor in weights.items():
                torch.testing.assert_close(tensor, alone[key], rtol=0, atol=1e-9, msg=f"{name}: {key}")


def test_a_stopped_run_goes_on_with_the_same_bits_from_the_same_start_alone(tmp_path: Path) -> None:
    config = tiny_run.settings(**SHORT)

    def run(folder: Path, *, seed: int = 0, stop: int = 0) -> dict[str, Tensor]:
        model = tiny_run.tiny_model()
        if seed:
            model.init_weights(seed)
        techniques = tiny_run.watching(stop=tiny_run.StopAfter(stop))
        tiny_run.run(folder, config, model=model, heldout=[], techniques=techniques)
        return model.state_dict()

    whole = run(tmp_path / "whole")
    with pytest.raises(Stopped):
        run(tmp_path / "cut", stop=2)
    with pytest.raises(ArtifactError, match="l2_sp"):
        run(tmp_path / "cut", seed=99)
    resumed = run(tmp_path / "cut")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_what_takes_its_start_away_is_refused() -> None:
    for settings in ({"lora": {"r": 4}}, {"load_balance": {"pipeline": True}}, {"async_updates": {"mode": "hogwild"}}):
        with config_error("l2_sp", match="l2_sp"):
            tiny_run.settings(l2_sp=0.1, **settings)
