"""What `--dry-run` says of memory against the peaks of real processes, over small models with large batches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelwright.core.artifacts import RunDir, read_attempts
from modelwright.core.progress import SilentProgress
from modelwright.pipeline.estimate.time_budget import stage_estimates
from modelwright.pipeline.resolve import resolve
from modelwright.pipeline.run_config import previous_config
from modelwright.pipeline.stage import Rates

TOLERANCE = 0.15
NO_RATES = Rates(flops_per_s={"fp32": 1.0, "bf16": 1.0})
"""For memory, which no speed changes."""
SETTINGS = {
    "training.precision.policy": "fp32",
    "model.num_layers": "6",
    "model.model_dim": "256",
    "model.ffn_dim": "704",
    "pretrain.num_steps": "3",
    "pretrain.batch_tokens": "8192",
    "sft.num_steps": "3",
    "sft.batch_tokens": "8192",
    "evaluate.multiple_choice.num_questions": "20",
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak of a stage can be reset on Linux only")


def run(folder: Path, stages: str) -> None:
    """These stages in a process of their own, as a user starts them."""
    words = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "modelwright.cli.entry", "run", "tiny", "--run-dir", str(folder), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--stages", stages], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@linux
def test_peaks_are_within_the_tolerance_of_the_plan(tmp_path):
    """Half of each peak of training is tensors, so that neither the process nor the model can hide behind the other."""
    home = RunDir(tmp_path / "run")
    run(home.path, "clean,tokenize,pack")
    errors = {}
    for stage in ("pretrain", "sft", "evaluate"):
        run(home.path, stage)
        config = previous_config(home)
        assert config is not None
        estimates, memories = stage_estimates(resolve(config, config, SilentProgress()), home, NO_RATES)
        (planned,) = (one.peak_bytes for one in estimates if one.name == stage)
        measured = read_attempts(home.stage(stage))[-1]["peak_bytes"]
        errors[stage] = planned / measured - 1
        if stage in memories:
            assert planned - memories[stage].process > 0.3 * planned
    assert {stage: error for stage, error in errors.items() if abs(error) > TOLERANCE} == {}, errors
