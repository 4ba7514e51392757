"""A stage that the package does not know, from an installed one: it is configured, planned, run, killed, resumed and
reported as the package's own stages are.
"""

import random
import time
from pathlib import Path

import pytest
import yaml

from modelwright.core.artifacts import RunDir, read_attempts, read_manifest
from modelwright.core.records import read_records
from rank_processes import Started, start_process

COMMAND = Path(__file__).parent / "stage_package" / "command.py"
STAGES = ["clean", "tokenize", "pack", "pretrain", "smoothed", "evaluate", "report"]
NUM_STEPS = 40
SETTINGS = {
    "recipe": "tiny",
    "stages": STAGES,
    "pack": {"seq_len": 128},
    "model": {"max_seq_len": 128},
    "tokenizer": {"vocab_size": 400},
    "pretrain": {"num_steps": 6, "batch_tokens": 512, "eval_every_steps": 3, "checkpoint_every_steps": 3},
    "smoothed": {
        "num_steps": NUM_STEPS,
        "batch_tokens": 512,
        "eval_every_steps": 10,
        "checkpoint_every_steps": 3,
        "smoothing": 0.2,
    },
    "evaluate": {"max_bytes_per_domain": 1000, "multiple_choice": {"num_questions": 2}},
}


def ended(started: Started) -> str:
    """What a command printed; it has to succeed."""
    code, output, errors = started.end()
    assert code == 0, output[-2000:] + errors[-2000:]
    return output


@pytest.fixture(scope="module")
def request_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML file with the stage, and text to train on."""
    folder, dice = tmp_path_factory.mktemp("smoothed"), random.Random(3)
    words = [a + b for a in ("ka", "lo", "mi", "ru") for b in ("na", "ri", "sto", "va", "len")] + ["the", "of", "and"]
    (folder / "text").mkdir()
    for number in range(30):
        lines = [" ".join(dice.choice(words) for _ in range(12)).capitalize() + "." for _ in range(20)]
        (folder / "text" / f"{number}.txt").write_text("\n".join(lines))
    data = {"sources": [str(folder / "text")], "validation_fraction": 0.2}
    (folder / "mine.yaml").write_text(yaml.safe_dump({**SETTINGS, "data": data}))
    return folder / "mine.yaml"


@pytest.fixture(scope="module")
def whole(request_file: Path) -> RunDir:
    """A run that nobody disturbs."""
    run = RunDir(request_file.parent / "whole")
    ended(start_process(COMMAND, "run", request_file, "--run-dir", run.path))
    return run


@pytest.mark.slow
def test_it_resumes_with_the_same_bits(request_file: Path, whole: RunDir) -> None:
    run = RunDir(request_file.parent / "killed")
    stage = run.stage("smoothed")
    started = start_process(COMMAND, "run", request_file, "--run-dir", run.path)
    while started.is_alive and not (stage.metrics.exists() and len(read_records(stage.metrics)) > 4):
        time.sleep(0.002)
    started.process.kill()
    started.end()
    assert [attempt["state"] for attempt in read_attempts(stage)] == ["running"]
    ended(start_process(COMMAND, "run", request_file, "--run-dir", run.path))
    assert [attempt["state"] for attempt in read_attempts(stage)] == ["killed", "done"]
    steps = [record["step"] for record in read_records(stage.metrics) if "loss" in record]
    assert steps == list(range(1, NUM_STEPS + 1))
    digests = [read_manifest(one.stage("smoothed").artifact).content_digest for one in (whole, run)]
    assert digests[0] == digests[1]
    results = (run.stage("evaluate").artifact / "results.json").read_text()
    assert '"final": "smoothed"' in results


@pytest.mark.slow
def test_it_shows_where_stages_show(request_file: Path, whole: RunDir) -> None:
    plain = yaml.safe_load(ended(start_process(COMMAND, "config", request_file, "--plain")))
    assert plain["stages"] == STAGES
    assert plain["smoothed"]["smoothing"] == 0.2
    assert "sft" not in plain
    plan = ended(start_process(COMMAND, "run", request_file, "--dry-run", "--run-dir", whole.path.with_name("new")))
    assert "77 min" in next(line for line in plan.splitlines() if line.startswith("smoothed"))
    assert "memory of smoothed: " in plan
    explained = ended(start_process(COMMAND, "explain", "smoothed.smoothing"))
    assert "Share of the probability" in explained
    page = whole.report.read_text()
    assert f"{NUM_STEPS} steps at 0.2." in page
    assert "share_right, held out" in page
    assert "reversed text, training" in page
    assert "smoothed model" in page


def test_its_settings_are_checked(request_file: Path) -> None:
    code, _, errors = start_process(COMMAND, "run", request_file, "--dry-run", "--smoothed.smoothing", "2").end()
    assert code == 2
    assert "smoothed.smoothing: must be in [0, 1), got 2.0" in errors
    code, _, errors = start_process(COMMAND, "run", request_file, "--dry-run", "--smoothed.smothing", "0.2").end()
    assert code == 2
    assert "--smoothed.smothing: unknown setting; did you mean --smoothed.smoothing?" in errors


def test_a_layout_that_it_does_not_declare_to_bear_is_refused_before_the_first_stage(request_file: Path) -> None:
    new = request_file.parent / "refused"
    for words in (["--dry-run"], []):
        layout = ["--nproc", "2", "--parallel.context", "2", "--run-dir", new]
        code, _, errors = start_process(COMMAND, "run", request_file, *words, *layout).end()
        assert code == 2, errors
        assert "smoothed: needs whole rows on every rank, which parallel.context 2 takes away" in errors
        assert "it has to declare what it needs" in errors
        assert not (new / "clean").exists()
