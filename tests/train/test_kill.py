"""kill -9 amid steps and amid checkpoints: the final weights are the undisturbed run's, bit for bit."""

import os
import signal
import subprocess
import sys

import torch

from modelwright.core.records import column, read_records


def test_killed_runs_end_with_the_same_bits(tiny, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, tiny.__file__, "kills", str(tmp_path / "killed"), "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *kills, last = map(int, done.stdout.split())
    assert kills.count(signal.SIGKILL) >= 4, (kills, done.stderr)
    assert last == 0, done.stderr

    tiny.run(tmp_path / "whole")
    whole, killed = (tiny.final_weights(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    for metric in ("loss", "grad_norm", "heldout_loss"):
        recorded = [column(read_records(tmp_path / name / "metrics.jsonl"), metric) for name in ("whole", "killed")]
        assert recorded[0] == recorded[1]
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.partial"))
