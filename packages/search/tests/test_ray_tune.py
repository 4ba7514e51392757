"""`examples/cluster/ray_tune.py` on this machine: two trials, which are runs of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray.tune", exc_type=ImportError)

SCRIPT = Path(__file__).parents[3] / "examples" / "cluster" / "ray_tune.py"


def manifest(run: Path, stage: str) -> dict:
    return json.loads((run / stage / "artifact" / "manifest.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)  # Ray starts processes that import PyTorch, which takes minutes on a busy machine
def test_two_trials_are_runs_and_the_better_one_is_named(tmp_path: Path) -> None:
    text = "\n".join(f"{n} is followed by {n + 1}, and twice {n} is {2 * n}: a line of text." for n in range(900))
    (tmp_path / "text.txt").write_text(text)
    words = ["tiny", "--runs", "tune", "--trials", "2", f"--data.sources={tmp_path / 'text.txt'}"]
    words += ["--data.validation_fraction=0.2", "--tokenizer.vocab_size=400", "--pack.seq_len=64"]
    words += ["--model.max_seq_len=64", "--pretrain.batch_tokens=256", "--pretrain.num_steps=4"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "tune"
    runs = [path.parent for path in folder.glob("*/config.yaml") if path.parent.name != "rows"]
    assert len(runs) == 2
    rates = [yaml.safe_load((run / "config.yaml").read_text())["pretrain"]["learning_rate"] for run in runs]
    assert len(set(rates)) == 2
    assert all(1e-3 <= rate <= 1e-2 for rate in rates)
    assert all(manifest(run, "pretrain")["facts"]["num_steps"] == 4 for run in runs)
    rows = manifest(folder / "rows", "pack")
    assert all(manifest(run, "pack") == rows for run in runs), "the rows are made once"
    losses = {manifest(run, "pretrain")["facts"]["heldout_loss"]: run for run in runs}
    assert f"lowest held-out loss {min(losses):.4f}: {losses[min(losses)]}" in done.stdout
