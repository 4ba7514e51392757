"""A checkpoint of pipeline 2 x data 2 x tensor 2 goes on under any other layout: the next losses are the same."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelwright.core.records import column, read_records
from tolerances import TOLERANCES

SCRIPT = Path(__file__).with_name("three_axes_run.py")
SAVED_AT, END = 4, 10
LOSS = TOLERANCES["fp32_loss"]
CUBE = {"pipeline": 2, "data": 2, "tensor": 2}
LAYOUTS = {
    "cube": (8, CUBE),
    "one": (1, {}),
    "data": (4, {"data": 4}),
    "tensor": (4, {"tensor": 4}),
    "sharded": (2, {"shard": "full"}),
    "stages": (2, {"pipeline": 2}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("three-axes")
    settings = {
        "num_microbatches": 2,
        "eval_every_steps": 0,
        "checkpoint_every_steps": SAVED_AT,
        "keep_best": False,
        "keep_last": 5,
    }
    start(folder, [{"folder": "saved", "size": 8, "parallel": CUBE, "settings": {**settings, "num_steps": END}}])
    for name in LAYOUTS:
        shutil.copytree(folder / "saved", folder / name)
        for path in (folder / name / "checkpoints").glob("step-*"):
            if path.name != f"step-{SAVED_AT:08d}":
                shutil.rmtree(path)
    start(
        folder,
        [
            {"folder": name, "size": size, "parallel": parallel, "settings": {**settings, "num_steps": END}}
            for name, (size, parallel) in LAYOUTS.items()
        ],
    )
    return folder


def start(folder: Path, cases: list[dict]) -> None:
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(folder / "cases.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


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
