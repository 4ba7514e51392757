"""A checkpoint of pipeline 2 x data 2 x tensor 2 goes on under any other layout: the next losses are the same."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from distributed import run_distributed
from modelwright.core.config import parse
from modelwright.core.records import column, read_records
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import ParallelConfig, World
from tolerances import TOLERANCES

pytestmark = pytest.mark.slow

SAVED_AT, END = 3, 6
SETTINGS = {
    "num_steps": END,
    "gradient_accumulation_steps": 2,
    "eval_every_steps": 0,
    "checkpoint_every_steps": SAVED_AT,
    "keep_best": False,
    "keep_last": 5,
}
LOSS = TOLERANCES["fp32_loss"]
CUBE = {"pipeline": 2, "data": 2, "tensor": 2}
LAYOUTS = {
    "cube": (8, CUBE),
    "one": (1, {}),
    "data": (4, {"data": 4}),
    "tensor": (4, {"tensor": 4}),
    "sharded": (2, {"zero_stage": 3}),
    "stages": (2, {"pipeline": 2}),
}


def train(world: World, folder: Path, layout: dict[str, Any]) -> None:
    model = Decoder(replace(tiny_run.SHAPE, num_kv_heads=4))  # four ranks can share its heads
    model.init_weights(0)
    parallel = parse(ParallelConfig, layout)
    tiny_run.run(folder, tiny_run.settings(**SETTINGS), model=model, world=world, parallel=parallel)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("three-axes")
    run_distributed(train, 8, folder / "saved", CUBE)
    for name, (size, layout) in LAYOUTS.items():
        shutil.copytree(folder / "saved", folder / name)
        for path in (folder / name / "checkpoints").glob("step-*"):
            if path.name != f"step-{SAVED_AT:08d}":
                shutil.rmtree(path)
        run_distributed(train, size, folder / name, layout)
    return folder


def losses(folder: Path) -> list[float]:
    return [value for _, value in column(read_records(folder / "metrics.jsonl"), "loss")]


@pytest.mark.parametrize("name", LAYOUTS)
def test_next_losses_are_those_of_the_layout_that_saved(runs, name):
    expected = losses(runs / "saved")
    found = losses(runs / name)
    assert len(found) == END
    assert found[:SAVED_AT] == expected[:SAVED_AT]
    assert found[SAVED_AT:] == pytest.approx(expected[SAVED_AT:], rel=LOSS["rtol"], abs=LOSS["atol"])
    assert abs(expected[SAVED_AT] - expected[0]) > 0.1  # losses do move
