"""The first losses of the tiny recipe on a fixed text: a change that was meant to change nothing shows here.

After a deliberate change: MODELWRIGHT_WRITE_GOLDEN=1 pytest tests/pipeline/test_golden_losses.py
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from modelwright.core.records import column, read_records

Command = Callable[..., subprocess.CompletedProcess[str]]
GOLDEN = Path(__file__).parent / "golden" / "tiny_losses.txt"
RELATIVE_TOLERANCE = 2e-4
"""Between processors and library versions FP32 sums differ in their last bits, which training magnifies."""


@pytest.mark.slow
def test_tiny_losses(inside: Command, tmp_path: Path, small_words: tuple[str, ...]) -> None:
    done = inside(*small_words, "--run-dir", str(tmp_path / "run"), "--stages", "clean,tokenize,pack,pretrain,sft")
    assert done.returncode == 0, done.stderr
    lines = []
    for stage in ("pretrain", "sft"):
        records = read_records(tmp_path / "run" / stage / "metrics.jsonl")
        for name in ("loss", "heldout_loss"):
            lines += [f"{stage} {name} {step} {value:.6f}" for step, value in column(records, name)]
    if os.environ.get("MODELWRIGHT_WRITE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text("\n".join(lines) + "\n")
    expected = GOLDEN.read_text().splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == [line.rsplit(" ", 1)[0] for line in expected]
    measured = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert measured == pytest.approx([float(line.rsplit(" ", 1)[1]) for line in expected], rel=RELATIVE_TOLERANCE)
