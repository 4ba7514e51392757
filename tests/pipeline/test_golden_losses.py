"""The first losses of two recipes on fixed texts: a change that was meant to change nothing shows here.

After a deliberate change: MODELWRIGHT_WRITE_GOLDEN=1 pytest tests/pipeline/test_golden_losses.py
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from modelwright.core.records import column, read_records
from modelwright_agents import tool_corpus

Command = Callable[..., subprocess.CompletedProcess[str]]
GOLDEN = Path(__file__).parent / "golden"
RELATIVE_TOLERANCE = 2e-4
"""Between processors and library versions FP32 sums differ in their last bits, which training magnifies."""


def compare(run: Path, file: str) -> None:
    """Compares the losses of a run with those of a file, or writes the file."""
    lines = []
    for stage in ("pretrain", "sft"):
        records = read_records(run / stage / "metrics.jsonl")
        for name in ("loss", "heldout_loss"):
            lines += [f"{stage} {name} {step} {value:.6f}" for step, value in column(records, name)]
    if os.environ.get("MODELWRIGHT_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / file).write_text("\n".join(lines) + "\n")
    expected = (GOLDEN / file).read_text().splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == [line.rsplit(" ", 1)[0] for line in expected]
    measured = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert measured == pytest.approx([float(line.rsplit(" ", 1)[1]) for line in expected], rel=RELATIVE_TOLERANCE)


@pytest.mark.slow
def test_tiny_losses(inside: Command, tmp_path: Path, small_words: tuple[str, ...]) -> None:
    done = inside(*small_words, "--run-dir", str(tmp_path / "run"), "--stages", "clean,tokenize,pack,pretrain,sft")
    assert done.returncode == 0, done.stderr
    compare(tmp_path / "run", "tiny_losses.txt")


@pytest.mark.slow
def test_losses_of_calls(inside: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe `tools` on fewer conversations: rendering of calls, masks and the Muon of its fine-tuning."""
    monkeypatch.setattr(tool_corpus, "NUM_CONVERSATIONS", 120)
    done = inside("run", "tools", "--run-dir", str(tmp_path / "run"), "--stages", "clean,tokenize,pack,pretrain,sft",
                  "--pretrain.num_steps", "3", "--sft.num_steps", "5", "--sft.eval_every_steps", "5",
                  "--training.precision.policy", "fp32",
                  "--hardware.device", "cpu", "--hardware.num_threads", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    compare(tmp_path / "run", "tools_losses.txt")
