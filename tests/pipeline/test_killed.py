"""Killed at random moments, across stages, and run again: the final weights are those of an undisturbed run.

MODELWRIGHT_KILLS=10 pytest tests/pipeline/test_killed.py   ten runs, each killed once, instead of one killed thrice
"""

import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from modelwright.compress.int8 import GRID
from modelwright.compress.int8 import STEPS as STEPS_FILE
from modelwright.core.artifacts import read_attempts
from modelwright.pipeline.runner import RunDir
from rank_processes import Started, start_process

NUM_RUNS = int(os.environ.get("MODELWRIGHT_KILLS", "0"))
STAGES = "clean,tokenize,pack,pretrain,sft,student,distill,qat,evaluate,quantize"
STEPS = {"pretrain": 40, "sft": 20, "distill": 20, "qat": 20}
LONGER = (
    *(f"--{stage}.num_steps={steps}" for stage, steps in STEPS.items()),
    "--student.num_layers=1", "--distill.batch_tokens=512", "--qat.batch_tokens=512", "--qat.start_step=6",
    "--qat.activations=tensor_moving_average", "--distill.checkpoint_every_steps=3", "--qat.checkpoint_every_steps=3",
    "--model.attention_gate=head", "--model.head_budget=0.6",
)  # fmt: skip
MODELS = ("pretrain", "sft", "student", "distill", "qat", "quantize")


def start(words: Sequence[str], run: Path) -> Started:
    return start_process("modelwright.cli.main", *words, "--run-dir", run)


def weights(run: Path) -> dict[str, str]:
    """Hashes of everything that a later stage builds on."""
    files = [f"{stage}/artifact/model.safetensors" for stage in MODELS]
    files += [f"qat/artifact/{name}" for name in (GRID, STEPS_FILE)]
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
    start_process("platform").end()  # whatever has to be started first is not a part of that time
    started = time.monotonic()
    finish(words, folder)
    return folder, time.monotonic() - started


def kill_at(words: Sequence[str], run: Path, moment_s: float) -> None:
    started = start(words, run)
    started.process.join(moment_s)
    started.process.kill()
    started.end()


def finish(words: Sequence[str], run: Path) -> None:
    code, _, errors = start(words, run).end()
    assert code == 0, errors


@pytest.mark.slow
@pytest.mark.skipif(NUM_RUNS > 0, reason="the long form runs instead")
def test_killed_thrice(tmp_path: Path, undisturbed: tuple[Path, float], words: tuple[str, ...]) -> None:
    whole, duration_s = undisturbed
    dice = random.Random()
    moments = [dice.uniform(0.2, 0.9) * duration_s for _ in range(3)]
    for moment in moments:
        kill_at(words, tmp_path / "run", moment)
    finish(words, tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole), f"killed after {moments} s"
    for stage, num_steps in STEPS.items():
        assert steps(tmp_path / "run", stage) == steps(whole, stage) == list(range(1, num_steps + 1)), stage


@pytest.mark.skipif(NUM_RUNS == 0, reason="set MODELWRIGHT_KILLS to the number of runs")
@pytest.mark.parametrize("number", range(max(1, NUM_RUNS)))
@pytest.mark.timeout(900)
def test_killed_once(number: int, tmp_path: Path, undisturbed: tuple[Path, float], words: tuple[str, ...]) -> None:
    whole, duration_s = undisturbed
    moment = random.Random().uniform(0.1, 0.95) * duration_s
    kill_at(words, tmp_path / "run", moment)
    reached = sorted(path.parent.name for path in (tmp_path / "run").glob("*/stage.json"))
    finish(words, tmp_path / "run")
    assert weights(tmp_path / "run") == weights(whole), f"killed after {moment:.1f} s in {reached}"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["distill", "qat"])
def test_killed_in_a_stage_that_makes_a_model_smaller(
    stage: str, tmp_path: Path, undisturbed: tuple[Path, float], words: tuple[str, ...]
) -> None:
    """After a checkpoint and before the end; of `qat` while ranges are observed, and while factors are rounded. What
    is made before the stage is taken from the run that nobody disturbed.
    """
    run, names = tmp_path / "run", STAGES.split(",")
    for name in names[: names.index(stage)]:
        shutil.copytree(undisturbed[0] / name, run / name)
    metrics = run / stage / "metrics.jsonl"
    for step in (4, 10):
        code, errors = signal_when(
            lambda step=step: metrics.exists() and steps(run, stage)[-1:] >= [step], start(words, run), signal.SIGKILL
        )
        assert code == -signal.SIGKILL, errors
        assert not (run / stage / "artifact" / "manifest.json").exists()
    finish(words, run)
    assert weights(run) == weights(undisturbed[0])
    assert steps(run, stage) == list(range(1, STEPS[stage] + 1))


@pytest.mark.slow
def test_asked_to_stop_in_training(tmp_path: Path, undisturbed: tuple[Path, float], words: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    metrics = run / "pretrain" / "metrics.jsonl"
    for number in (signal.SIGTERM, signal.SIGINT):
        before = metrics.stat().st_size if metrics.exists() else 0
        code, errors = signal_when(
            lambda size=before: metrics.exists() and metrics.stat().st_size > size,
            start([*words, "--pretrain.checkpoint_every_steps=1000"], run),
            number,
        )
        assert code == 128 + number, errors
        assert errors.strip().splitlines()[-1].startswith("modelwright: stopped after step"), errors
        assert "Traceback" not in errors
    attempts = read_attempts(RunDir(run).stage("pretrain"))
    assert [attempt["state"] for attempt in attempts] == ["stopped", "stopped"]
    finish(words, run)
    assert weights(run) == weights(undisturbed[0])


def signal_when(condition: Callable[[], bool], started: Started, number: int) -> tuple[int, str]:
    """Send the signal at that moment; exit status and errors of what came of it."""
    while started.is_alive and not condition():
        time.sleep(0.005)
    started.send_signal(number)
    code, _, errors = started.end()
    return code, errors


def test_asked_to_stop_elsewhere(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    cleaned = run / "clean" / "stage.json"
    code, errors = signal_when(cleaned.exists, start(words, run), signal.SIGTERM)
    assert code == 143, errors
    assert errors.strip().splitlines()[-1].startswith("modelwright: stopped; what was finished stays"), errors
    assert "Traceback" not in errors
