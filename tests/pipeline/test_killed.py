"""Killed at random moments, across stages, and run again: the final weights are those of an undisturbed run.

MODELWRIGHT_KILLS=10 pytest tests/pipeline/test_killed.py   ten runs, each killed once, instead of one killed thrice
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from modelwright.pipeline.journal import read_attempts
from modelwright.pipeline.runner import RunDir

Command = Callable[..., subprocess.CompletedProcess[str]]
NUM_RUNS = int(os.environ.get("MODELWRIGHT_KILLS", "0"))
STAGES = "clean,tokenize,pack,pretrain,sft,evaluate,quantize"
LONGER = ("--pretrain.num_steps=60", "--sft.num_steps=30")


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "modelwright.cli.main", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def weights(run: Path) -> dict[str, str]:
    """Hashes of everything that a later stage builds on."""
    files = [f"{stage}/artifact/model.safetensors" for stage in ("pretrain", "sft", "quantize")]
    files += ["tokenize/artifact/tokenizer.json", "pack/artifact/pretrain/train/tokens-00000.bin"]
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in files}


def steps(run: Path, stage: str) -> list[int]:
    """The steps whose loss was recorded, in order."""
    from modelwright.core.records import read_records

    return [record["step"] for record in read_records(run / stage / "metrics.jsonl") if "loss" in record]


@pytest.fixture(scope="module")
def words(small_words: tuple[str, ...]) -> tuple[str, ...]:
    return (*small_words, *LONGER, "--stages", STAGES)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, words: tuple[str, ...]) -> tuple[Path, float]:
    """A run that nobody disturbs, and the seconds that it takes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    started = time.monotonic()
    process = start([*words, "--run-dir", str(folder)])
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return folder, time.monotonic() - started


def kill_at(words: Sequence[str], run: Path, moment_s: float) -> None:
    process = start([*words, "--run-dir", str(run)])
    try:
        process.wait(moment_s)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()


def finish(words: Sequence[str], run: Path) -> None:
    process = start([*words, "--run-dir", str(run)])
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


@pytest.mark.skipif(NUM_RUNS > 0, reason="the long form runs instead")
def test_killed_thrice(tmp_path: Path, undisturbed: tuple[Path, float], words: tuple[str, ...]) -> None:
    whole, duration_s = undisturbed
    dice = random.Random()
    moments = [dice.uniform(0.2, 0.9) * duration_s for _ in range(3)]
    for moment in moments:
        kill_at(words, tmp_path / "run", moment)
    finish(words, tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole), f"killed after {moments} s"
    assert steps(tmp_path / "run", "pretrain") == steps(whole, "pretrain") == list(range(1, 61))
    assert steps(tmp_path / "run", "sft") == list(range(1, 31))


@pytest.mark.skipif(NUM_RUNS == 0, reason="set MODELWRIGHT_KILLS to the number of runs")
@pytest.mark.parametrize("number", range(NUM_RUNS))
@pytest.mark.timeout(900)
def test_killed_once(number: int, tmp_path: Path, undisturbed: tuple[Path, float], words: tuple[str, ...]) -> None:
    whole, duration_s = undisturbed
    moment = random.Random().uniform(0.1, 0.95) * duration_s
    kill_at(words, tmp_path / "run", moment)
    reached = sorted(path.parent.name for path in (tmp_path / "run").glob("*/stage.json"))
    finish(words, tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole), f"killed after {moment:.1f} s in {reached}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_in_training(
    tmp_path: Path, undisturbed: tuple[Path, float], words: tuple[str, ...], number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start([*words, "--run-dir", str(run), "--pretrain.checkpoint_every_steps=1000"])
    metrics = run / "pretrain" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, 143), errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("modelwright: stopped after step"), errors
    assert "Traceback" not in errors
    assert read_attempts(RunDir(run).stage("pretrain"))[-1]["state"] == "stopped"
    finish(words, run)
    assert weights(run) == weights(undisturbed[0])


def test_asked_to_stop_elsewhere(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    process = start([*words, "--run-dir", str(run)])
    while process.poll() is None and not (run / "clean" / "stage.json").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert errors.strip().splitlines()[-1].startswith("modelwright: stopped; what was finished stays"), errors
    assert "Traceback" not in errors
