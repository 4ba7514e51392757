"""Several processes started by one command behave as one: results, messages, exit codes, signals, lost processes."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelwright.core.artifacts import RunDir, read_attempts
from modelwright.core.records import column, read_records
from modelwright.pipeline.process_group import PeerLost, as_lost_peer
from rank_processes import Started, start_process
from tolerances import TOLERANCES

pytestmark = pytest.mark.slow

Command = Callable[..., subprocess.CompletedProcess[str]]
DATA = "clean,tokenize,pack"


def start(*words: str) -> Started:
    return start_process("modelwright.cli.main", *words)


def finish(process: Started) -> tuple[int, str]:
    """Exit code and what it said on stderr."""
    process.process.join(200)
    left = workers(process)  # of a process that does not end
    try:
        code, _, errors = process.end(time.monotonic())
    finally:
        for worker in left:
            os.kill(worker, signal.SIGKILL)
    return code, errors


def workers(process: Started) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(word) for word in children.read_text().split()] if children.exists() else []


def wait_until(process: Started, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while process.is_alive and not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def losses(run: Path) -> torch.Tensor:
    return torch.tensor(column(read_records(run / "pretrain" / "metrics.jsonl"), "loss"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, command: Command, small_words: Sequence[str]) -> Path:
    """A run whose data is ready."""
    run = tmp_path_factory.mktemp("prepared") / "run"
    done = command(*small_words, "--stages", DATA, "--run-dir", str(run))
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def run(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "run"))


def training(run: Path, *more: str) -> list[str]:
    return ["run", str(run), "--stages", "pretrain,report", *more]


@pytest.mark.slow
def test_two_processes_end_as_one_does(run: Path, inside: Command, command: Command) -> None:
    """And the ranks are placed by their links, which are all the same here."""
    alone = Path(shutil.copytree(run, run.with_name("alone")))
    assert inside(*training(alone)).returncode == 0
    done = command(*training(run, "--nproc", "2", "--parallel.reorder_ranks"))
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").exists()
    assert done.stdout.count("finished in") == 1
    assert done.stderr.count("placement: the ranks stay where they are") == 1
    torch.testing.assert_close(losses(run), losses(alone), **TOLERANCES["fp32_loss"])
    ours, theirs = (load_file(folder / "pretrain" / "artifact" / "model.safetensors") for folder in (run, alone))
    torch.testing.assert_close(ours, theirs, **TOLERANCES["fp32_trained"])
    entry = RunDir(run).read_info()["invocations"][-1]
    assert entry["world_size"] == 2
    assert entry["command"][-3:] == ["--nproc", "2", "--parallel.reorder_ranks"]
    assert entry["placement"]["order"] == [0, 1]
    assert entry["placement"]["links"]["bytes_per_s"][0][0] > 0
    assert json.loads((run / "links.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_they_save_and_one_goes_on(run: Path, inside: Command, number: signal.Signals) -> None:
    words = training(run, "--pretrain.num_steps=80", "--pretrain.checkpoint_every_steps=0")
    process = start(*words, "--nproc", "2")
    metrics = run / "pretrain" / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and metrics.stat().st_size > 0)
    process.send_signal(number)
    code, errors = finish(process)
    assert code == 128 + number, errors
    assert errors.count("modelwright: stopped after step") == 1
    assert "Traceback" not in errors
    assert read_attempts(RunDir(run).stage("pretrain"))[-1]["state"] == "stopped"
    done = inside(*words)
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stderr
    assert [record["step"] for record in read_records(metrics) if "loss" in record] == list(range(1, 81))


@pytest.mark.slow
@pytest.mark.parametrize("how", [("run", "--nproc", "2"), ("launch", "--nproc", "2", "run")])
@pytest.mark.parametrize("moment", ["starting", "preparing"])
def test_interrupted_outside_of_training(
    tmp_path: Path, small_words: Sequence[str], how: tuple[str, ...], moment: str
) -> None:
    """While the processes start, and while one of them prepares data and the other waits for it."""
    flags = how[1:] if how[0] == "run" else ()
    command = how if how[0] == "launch" else ("run",)
    process = start(*command, *small_words[1:], "--run-dir", str(tmp_path / "run"), *flags)
    is_there = {"starting": lambda: bool(workers(process)), "preparing": (tmp_path / "run/clean/stage.json").exists}
    wait_until(process, is_there[moment])
    process.send_signal(signal.SIGINT)
    code, errors = finish(process)
    assert code == 130, errors
    assert errors.strip().splitlines()[-1].endswith("; what was finished stays, the same command goes on from there")
    assert "Traceback" not in errors
    assert "gloo" not in errors


def test_a_peer_that_left_is_no_bug() -> None:
    text = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    lost = as_lost_peer(RuntimeError(text))
    assert isinstance(lost, PeerLost)
    assert text in str(lost)
    bug = RuntimeError("shapes do not fit")
    assert as_lost_peer(bug) is bug


@pytest.mark.slow
def test_a_users_error_is_told_once(run: Path, command: Command, inside: Command) -> None:
    """One that only the first of the processes meets, and some that are known before any is started."""
    with RunDir(run).lock():
        done = command(*training(run, "--nproc", "2"))
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert "is working in this run" in error
    for words, message in (
        (["--nproc", "0"], "--nproc: must be at least 1"),
        (["--nproc", "2", "--parallel.tensor", "3"], "parallel.data: "),
        (["--nproc", "2", "--pretrain.no_such", "3"], "unknown setting"),
    ):
        done = inside(*training(run, *words))
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert message in done.stderr


def num_restarts(errors: str) -> int:
    """How often the processes were started again, but for a port that another program had taken meanwhile."""
    return errors.count("starting again") - errors.count("EADDRINUSE")


@pytest.mark.slow
def test_a_process_lost_in_preparation_comes_back(tmp_path: Path, small_words: Sequence[str]) -> None:
    """The one that waits is killed while the first prepares data."""
    run = tmp_path / "run"
    process = start("launch", "--nproc", "2", *small_words, "--stages", DATA, "--run-dir", str(run))
    wait_until(process, lambda: (run / "clean" / "stage.json").exists())
    os.kill(workers(process)[-1], signal.SIGKILL)
    code, errors = finish(process)
    assert code == 0, errors
    assert num_restarts(errors) == 1, errors
    assert (run / "pack" / "artifact").exists()
    first, last = RunDir(run).read_info()["invocations"]
    assert first["restart"] == 0 < last["restart"]


def test_a_process_lost_in_training_comes_back(run: Path) -> None:
    words = ("run", str(run), "--stages", "pretrain", "--pretrain.num_steps=40")
    process = start("launch", "--nproc", "2", *words)
    metrics, checkpoints = run / "pretrain" / "metrics.jsonl", run / "pretrain" / "checkpoints"
    wait_until(process, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 20)
    # Not a draft (step-N.partial), which has its manifest before its name.
    wait_until(process, lambda: any(not one.parent.suffix for one in checkpoints.glob("step-*/manifest.json")))
    os.kill(workers(process)[0], signal.SIGKILL)
    code, errors = finish(process)
    assert code == 0, errors
    assert num_restarts(errors) == 1, errors
    assert "resuming from step" in errors
    assert [record["step"] for record in read_records(metrics) if "loss" in record] == list(range(1, 41))
    _, first, last = RunDir(run).read_info()["invocations"]
    assert first["restart"] == 0 < last["restart"]
    assert first["world_size"] == last["world_size"] == 2


@pytest.mark.slow
def test_a_process_too_many_waits(run: Path, command: Command) -> None:
    """Four rows in two microbatches have use for two of three processes; test_elastic.py kills one of three."""
    done = command(
        "launch", "--nproc", "3", "run", str(run), "--stages", "pretrain", "--pretrain.gradient_accumulation_steps=2"
    )
    assert done.returncode == 0, done.stderr
    assert RunDir(run).read_info()["invocations"][-1]["world_size"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "run: name a recipe"),
        (["tiny"], "launch: ends with a run command"),
        (["--nnodes", "two", "run", "tiny"], "--nnodes: 'two' is not a number"),
        (["--nnodes", "1:2", "run", "tiny"], "--rdzv-endpoint: several hosts need"),
        (["--nproc", "0", "run", "tiny"], "--nproc: must be at least 1"),
        (["run", "tiny", "--nproc", "2"], "--nproc: is an option of launch"),
        (["run", "tiny", "--parallel.tensor", "4"], "parallel.data: one replica of the model takes 4 processes"),
    ],
)
def test_mistakes_in_launching(inside: Command, words: list[str], message: str) -> None:
    done = inside("launch", *words)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert message in done.stderr
