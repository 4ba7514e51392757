"""The plan of a run against the run itself."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from modelwright.cli.main import main

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to reset the peak of a process")


@pytest.mark.slow
@linux
def test_peak_memory_of_a_run_is_predicted(capsys, tmp_path: Path) -> None:
    """Resident memory of a process that trains on large microbatches, most of which is activations."""
    lines = (f"{n} is followed by {n + 1}, and twice {n} is {2 * n}: a line of text." for n in range(6000))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    words = ["run", "tiny", "--run-dir", str(tmp_path / "run"), "--data.sources", str(tmp_path / "text.txt")]
    words += ["--stages", "clean,tokenize,pack,pretrain", "--pretrain.batch_tokens", "16384"]
    words += ["--pretrain.num_steps", "4", "--pretrain.eval_every_steps", "2"]
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "the gaps that the heap leaves between them" in printed
    predicted = re.search(r"^memory of pretrain: (\d+) MiB = process", printed, re.MULTILINE)
    assert predicted is not None, printed
    # The kernels that oneDNN compiles and the modules that Python imports are what a process holds besides tensors.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_VERBOSE": "2", "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-m", "modelwright.cli.main", *words]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
    journal = json.loads((tmp_path / "run" / "pretrain" / "stage.json").read_text())
    imported = re.findall(r"^import time:[^|]*\|[^|]*\| (\w+)$", done.stderr, re.MULTILINE)
    described = {
        "compiled kernels": done.stdout.count("create:cache_miss"),
        "imported": sorted(set(imported)),
        "run": json.loads((tmp_path / "run" / "run.json").read_text())["invocations"][-1],
    }
    measured = journal["attempts"][-1]["peak_bytes"] / 2**20
    assert int(predicted[1]) == pytest.approx(measured, rel=0.15), described
