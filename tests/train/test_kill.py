"""kill -9 amid steps and amid checkpoints: the final weights are the undisturbed run's, bit for bit."""

import signal

import tiny_run
import torch

from distributed import run_distributed
from modelwright.core.records import column, read_records


def test_killed_runs_end_with_the_same_bits(tiny, tmp_path):
    ((*signals, last),) = run_distributed(tiny_run.train_under_fire, 1, tmp_path / "killed", 0, 6, joins_world=False)
    assert signals.count(signal.SIGKILL) >= 4, signals
    assert last == 0

    tiny.run(tmp_path / "whole")
    whole, killed = (tiny.final_weights(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    for metric in ("loss", "grad_norm", "heldout_loss"):
        recorded = [column(read_records(tmp_path / name / "metrics.jsonl"), metric) for name in ("whole", "killed")]
        assert recorded[0] == recorded[1]
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.partial"))
