"""Ctrl-C ends every command with exit code 130 and SIGTERM with 143, wherever it is: one line, no traceback."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.pipeline.stages.init import save_model_folder
from rank_processes import Started, start_process

pytestmark = pytest.mark.slow

CODES = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "stopped")}
GOES_ON = "; what was finished stays, the same command goes on from there"
BOTH = pytest.mark.parametrize("number", list(CODES), ids=lambda number: number.name)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers fill its context: one of two letters always has the largest logit."""
    tokenizer = train_tokenizer(["what does this do? it copies"] * 9, TokenizerConfig(vocab_size=330))
    model = Decoder(
        ModelConfig(
            vocab_size=330, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_dim=32,
            max_seq_len=4096, tie_embeddings=False,
        )
    )  # fmt: skip
    model.init_weights(0)
    with torch.no_grad():
        assert model.head is not None
        (one,), (other,) = tokenizer.encode("w"), tokenizer.encode("d")
        model.head.weight.zero_()
        model.head.weight[one], model.head.weight[other] = 1.0, -1.0
    folder = tmp_path_factory.mktemp("model")
    save_model_folder(model, tokenizer, folder)
    return folder


def start(*words: object, cwd: Path | None = None) -> Started:
    return start_process("modelwright.cli.main", *words, cwd=cwd)


def handles_signals(pid: int) -> bool:
    """Whether the process has reached the command: the handlers of both signals are there."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
    return all(caught >> number - 1 & 1 for number in CODES)


def wait_until(is_alive: Callable[[], bool], is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while is_alive() and not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def end_by(started: Started, number: int, is_so: Callable[[], bool]) -> str:
    """Send the signal at that moment; what the process said, which ended with the signal's exit code."""
    wait_until(lambda: started.is_alive, is_so)
    started.send_signal(number)
    code, _, errors = started.end()
    assert code == CODES[signal.Signals(number)][0], errors
    assert "Traceback" not in errors
    return errors.strip().splitlines()[-1]


@BOTH
@pytest.mark.parametrize(
    ("command", "goes_on"), [("run", GOES_ON), ("plan layout", ""), ("lr-find", ""), ("config", ""), ("doctor", "")]
)
def test_while_a_file_is_read(tmp_path: Path, number: signal.Signals, command: str, goes_on: str) -> None:
    """A file that never ends: nothing is written to the pipe."""
    os.mkfifo(tmp_path / "settings.yaml")
    started = start(*command.split(), tmp_path / "settings.yaml")
    last = end_by(started, number, lambda: handles_signals(started.pid))
    assert last == f"modelwright: {CODES[number][1]}{goes_on}"


@BOTH
@pytest.mark.parametrize("words", [("export", "--to", "hf"), ("report",), ("chat",), ("serve",)])
def test_while_a_run_is_read(tmp_path: Path, number: signal.Signals, words: Sequence[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    os.mkfifo(tmp_path / "config.yaml")
    started = start(words[0], tmp_path, *words[1:])
    assert end_by(started, number, lambda: handles_signals(started.pid)) == f"modelwright: {CODES[number][1]}"


@BOTH
@pytest.mark.parametrize(
    "words",
    [
        ("prove", "gradient_accumulation", "--quick", "--results", "r"),
        ("doctor", "quickstart"),
    ],
)
def test_while_something_is_measured(tmp_path: Path, number: signal.Signals, words: Sequence[str]) -> None:
    started = start(*words, cwd=tmp_path)
    wait_until(lambda: started.is_alive, lambda: handles_signals(started.pid))
    time.sleep(0.3)
    assert end_by(started, number, lambda: True) == f"modelwright: {CODES[number][1]}"


@BOTH
def test_serving(model_folder: Path, number: signal.Signals) -> None:
    """It drains first, so there is nothing to say beside the lines of its log."""
    started = start("serve", model_folder, "--port", "0")
    wait_until(lambda: started.is_alive, lambda: "Serving" in started.output)
    started.send_signal(number)
    code, _, errors = started.end()
    assert code == CODES[number][0]
    assert not [line for line in errors.splitlines() if " INFO " not in line]


@BOTH
@pytest.mark.parametrize("is_answering", [False, True])
def test_chatting(model_folder: Path, tmp_path: Path, number: signal.Signals, is_answering: bool) -> None:
    """Ctrl-C at the prompt ends the chat; during an answer it ends the answer only.

    At temperature 0 the model goes on until its context is full, so that the answer does not end first.
    """
    pipe = tmp_path / "stdin"
    os.mkfifo(pipe)
    with open(pipe, "r+b", buffering=0) as questions:
        started = start_process("modelwright.cli.main", "chat", model_folder, "--temperature", "0", stdin=pipe)
        wait_until(lambda: started.is_alive, lambda: started.output.endswith("> "))
        if is_answering:
            num_shown = len(started.output)
            questions.write(b"what does this do?\n")
            wait_until(lambda: started.is_alive, lambda: len(started.output) > num_shown)
            started.send_signal(number)
            if number == signal.SIGINT:
                wait_until(lambda: started.is_alive, lambda: started.output.endswith("[stopped]\n\n> "))
        if not is_answering or number == signal.SIGINT:
            started.send_signal(number)
        code, _, errors = started.end()
    assert (code, errors) == (CODES[number][0], f"modelwright: {CODES[number][1]}\n")


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("stage", ["clean", "pretrain"])
def test_running_in_one_process(tmp_path: Path, number: signal.Signals, stage: str) -> None:
    sign = tmp_path / "run" / stage / ("stage.json" if stage == "clean" else "metrics.jsonl")
    words = ("run", "tiny", "--run-dir", tmp_path / "run", "--pretrain.num_steps", "100K")
    last = end_by(start(*words), number, lambda: sign.exists() and sign.stat().st_size > 0)
    if stage == "clean":
        assert last == f"modelwright: {CODES[number][1]}{GOES_ON}"
    else:
        assert last.startswith("modelwright: stopped after step")


@pytest.mark.slow
@BOTH
def test_a_test_of_rates(tmp_path: Path, number: signal.Signals) -> None:
    packed = tmp_path / "out" / "data" / "pack" / "artifact"
    words = ("lr-find", "tiny", "--out", tmp_path / "out", "--run-dir", tmp_path / "run", "--steps", "100000")
    last = end_by(start(*words), number, packed.exists)
    assert last in (
        "modelwright: stopped; the next test starts over", f"modelwright: {CODES[number][1]}"
    )  # fmt: skip


STUCK = """
import ctypes, sys, time
from dataclasses import replace
from modelwright.cli import main, processes
processes.GRACE_S = 0.5
def swallow(words):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            time.sleep(60)
        except (KeyboardInterrupt, SystemExit):
            pass
def block(words):
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):  # the second time waits for ever, and no signal ends it
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
print("begun", flush=True)
main.COMMANDS["run"] = replace(main.COMMANDS["run"], run={"swallow": swallow, "block": block}[sys.argv[1]])
sys.argv[1:] = ["run"]
sys.exit(main.main())
"""


@BOTH
@pytest.mark.parametrize("how", ["swallow", "block"])
def test_a_command_that_does_not_hear_ends_all_the_same(tmp_path: Path, number: signal.Signals, how: str) -> None:
    """A library swallows the exception, or a call does not return."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    started = start_process(script, how)
    wait_until(lambda: started.is_alive, lambda: "begun" in started.output and handles_signals(started.pid))
    assert end_by(started, number, lambda: True) == f"modelwright: {CODES[number][1]}{GOES_ON}"
