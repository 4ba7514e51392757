"""kill -9 amid steps and amid checkpoints: the final weights are the undisturbed run's, bit for bit."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny_run
import torch

from distributed import run_distributed
from modelwright.core.records import column, read_records
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.ops.int_grid import WeightGrid
from modelwright.pipeline.stages.qat import with_step_sizes
from modelwright.train.config import TrainConfig
from modelwright.train.techniques.fake_quantization import RANGES, QuantizationAwareConfig, fake_quantization

pytestmark = pytest.mark.slow

SHAPES: Mapping[str, ModelConfig] = {
    "selected heads": replace(tiny_run.SHAPE, head_budget=0.5),
    "gates of heads": replace(tiny_run.SHAPE, attention_gate="head"),
    "gates of elements and selected heads": replace(tiny_run.SHAPE, attention_gate="element", head_budget=0.6),
}
GRIDS: Mapping[str, QuantizationAwareConfig] = {
    "learned steps": QuantizationAwareConfig(
        weights=WeightGrid(bits=4, granularity="channel"), learned_steps=True, start_step=5
    ),
    "observed ranges": QuantizationAwareConfig(activations="tensor_moving_average", start_step=7),
}
CASES = ("plain", *SHAPES, *GRIDS)


def train(name: str, folder: Path, config: TrainConfig) -> None:
    model = Decoder(SHAPES.get(name, tiny_run.SHAPE))
    model.init_weights(0)
    objective = NextToken(tiny_run.Rows())
    grid = GRIDS.get(name)
    if grid and grid.learned_steps:
        objective = with_step_sizes(objective, grid.weights)
    techniques = [partial(fake_quantization, grid)] if grid else []
    tiny_run.run(folder, config, model=model, objective=objective, techniques=techniques)


def under_fire(name: str, folder: Path) -> list[int]:
    return tiny_run.train_under_fire(folder, 0, 6, begin=partial(train, name))


@pytest.mark.parametrize("name", CASES)
def test_killed_runs_end_with_the_same_bits(name: str, tmp_path: Path) -> None:
    ((*signals, last),) = run_distributed(under_fire, 1, name, tmp_path / "killed", joins_world=False)
    assert signals.count(signal.SIGKILL) >= 4, signals
    assert last == 0

    train(name, tmp_path / "whole", tiny_run.settings())
    whole, killed = (tiny_run.final_weights(tmp_path / one) for one in ("whole", "killed"))
    assert all(torch.equal(whole[key], killed[key]) for key in whole)
    metrics = ["loss", "grad_norm", "heldout_loss"] + ["auxiliary_loss/head_budget"] * ("selected" in name)
    for metric in metrics:
        recorded = [column(read_records(tmp_path / one / "metrics.jsonl"), metric) for one in ("whole", "killed")]
        assert recorded[0] == recorded[1] != []
    if name in GRIDS:
        assert (tmp_path / "killed" / RANGES).read_bytes() == (tmp_path / "whole" / RANGES).read_bytes()
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.partial"))
