"""Very little text: a run says what it cannot measure and what it repeats."""

import subprocess
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_three_lines_of_text(inside: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(
        "The first line has a few words, all of them short.\nThe second line has other words, some of them long.\n"
        "The third line ends the text, which nobody would call a corpus.\n"
    )
    done = inside(
        "run", "tiny", "--data.sources", str(tmp_path / "mine.txt"), "--run-dir", str(tmp_path / "run"),
        "--stages", "clean,tokenize,pack,pretrain", "--pretrain.num_steps", "4", "--pretrain.eval_every_steps", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    (tokenizer,) = (line for line in lines if line.startswith("tokenizer: ") and "tokens" in line)
    assert "no document is held out" in tokenizer
    assert "data.validation_fraction" in tokenizer
    assert not tokenizer.rstrip().endswith(":")
    (warning,) = (line for line in lines if line.startswith("pretrain: warning"))
    assert "fills only 1 row and is read 16 times" in warning
