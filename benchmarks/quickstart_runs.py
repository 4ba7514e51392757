"""Runs of the quickstart's pretraining through the command line, on data that is prepared once. They take AdamW, with
which the recorded results were measured and whose states some techniques need.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelwright.core.records import read_records

ADAMW = (
    "--pretrain.optimizer", "adamw", "--pretrain.learning_rate", "2e-3",
    "--pretrain.schedule.kind", "warmup_cosine", "--pretrain.schedule.final_lr_fraction", "0.05",
)  # fmt: skip


def prepare(folder: Path) -> None:
    """As `modelwright run quickstart` does it; nothing where it is done already."""
    run("quickstart", "--run-dir", str(folder), "--stages", "clean,tokenize,pack", threads=os.cpu_count() or 1)


def pretrain(prepared: Path, folder: Path, settings: Sequence[str], *, threads: int) -> list[dict[str, Any]]:
    """The records of one run on a copy of the prepared folder, which goes afterwards. threads: of all processes."""
    shutil.copytree(prepared, folder)
    run(str(folder), "--stages", "pretrain", *ADAMW, *settings, threads=threads)
    records = read_records(folder / "pretrain" / "metrics.jsonl")
    shutil.rmtree(folder)
    return records


def run(*words: str, threads: int) -> None:
    """`modelwright run ...` in a process of its own. Ends the program with its error if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "modelwright.cli.main", "run", *words, "--hardware.num_threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
