"""Training with its tensors in the heap for tensors: the bits of training in glibc's, on one process and on two."""

import json
import platform
import shutil
from pathlib import Path

import heap_runs
import pytest
import torch

from modelwright.ops.tensor_heap import SWITCH
from rank_processes import all_well, start_process, wait_for
from wired_cases import COPIES, Runs, case, weights

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("g++") is None, reason="is built on Linux, by g++"
)


@pytest.mark.slow
def test_the_same_bits(tmp_path):
    """Weights, losses, norms and held-out losses, with evaluations and checkpoints in between."""
    started = [
        start_process(Path(heap_runs.__file__), tmp_path / switch, environment={SWITCH: switch}) for switch in "01"
    ]
    without, within = (json.loads(output.splitlines()[-1]) for output in all_well(wait_for(started)))
    assert without["peak_bytes"] == 0
    assert within["peak_bytes"] > 2**16
    assert within["runs"] == without["runs"]
    assert len({run["sha256"] for run in within["runs"].values()}) > 4


WIDE = {"num_layers": 2, "ffn_dim": 1024}


@pytest.mark.slow
def test_two_processes(tmp_path, monkeypatch):
    """One copy in shared memory, copies whose sums begin in backward, and parts of one model."""
    layouts = {"shared": {}, "copies": COPIES, "sharded": {"parallel": {"zero_stage": 3}}}
    runs = {}
    for switch in "01":
        monkeypatch.setenv(SWITCH, switch)
        cases = [case(name, shape=WIDE, **layout) for name, layout in layouts.items()]
        runs[switch] = Runs(tmp_path / switch, cases)
        for name in layouts:
            runs[switch].folder(name)
    for name in layouts:
        for rank in range(2):
            without, within = (weights(runs[switch], name, rank) for switch in "01")
            assert all(torch.equal(without[key], within[key]) for key in without)
