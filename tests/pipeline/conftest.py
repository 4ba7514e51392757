"""What the end-to-end tests share: a small corpus that is the same everywhere, and the command line as a process."""

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from modelwright.cli.main import main
from rank_processes import start_process

SMALL = (
    "--pack.seq_len=128", "--model.max_seq_len=128", "--pretrain.batch_tokens=512", "--sft.batch_tokens=512",
    "--pretrain.num_steps=12", "--pretrain.eval_every_steps=6", "--pretrain.checkpoint_every_steps=4",
    "--sft.num_steps=8", "--sft.eval_every_steps=4", "--sft.checkpoint_every_steps=3",
    "--evaluate.max_bytes_per_domain=2000",
    "--evaluate.multiple_choice.num_questions=5", "--tokenizer.vocab_size=400", "--serve.int8.backend=int_mm",
)  # fmt: skip

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prose, code and questions made of a few words, drawn by a fixed generator."""
    folder = tmp_path_factory.mktemp("corpus")
    dice = random.Random(7)
    words = [a + b for a in ("ka", "lo", "mi", "ru", "te", "so") for b in ("na", "ri", "sto", "va", "len", "pit")]

    def sentence(length: int) -> str:
        return " ".join(dice.choice(words) for _ in range(length)).capitalize() + "."

    for number in range(24):
        text = "\n\n".join(" ".join(sentence(dice.randint(5, 12)) for _ in range(5)) for _ in range(6))
        (folder / f"prose-{number}.txt").write_text(text)
        names = [(dice.choice(words), dice.choice(words), dice.choice(words)) for _ in range(20)]
        lines = [f"def {name}_{i}({given}):\n    return {result}\n" for i, (name, given, result) in enumerate(names)]
        (folder / f"code-{number}.py").write_text("\n".join(lines))
    with open(folder / "pairs.jsonl", "w") as file:
        for number in range(160):
            name = f"{dice.choice(words)}_{number}"
            record = {"question": f"What does `{name}` do?", "answer": f"It is {sentence(dice.randint(6, 14))}"}
            file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture(scope="session")
def s3() -> Iterator[Any]:
    """fsspec's file system of a local S3-compatible server. One for all tests: both keep their state in the process."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    values = {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "ENDPOINT_URL": f"http://{host}:{port}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(f"AWS_{name}", value)
        yield fsspec.filesystem("s3")
    server.stop()


@pytest.fixture(scope="session")
def command() -> Command:
    """`modelwright ...` as a process; stdout and stderr as text."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        code, output, errors = start_process("modelwright.cli.main", *words).end()
        return subprocess.CompletedProcess(words, code, output, errors)

    return run


@pytest.fixture
def inside(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`modelwright ...` within this process: the same answers without the time to start, whatever else runs here."""
    monkeypatch.setattr("modelwright.pipeline.run.busy_machine", lambda *_: "")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = main(list(words))
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, shown.out, shown.err)

    return run


@pytest.fixture(scope="session")
def small_words(corpus: Path) -> tuple[str, ...]:
    """The tiny recipe on the small corpus with very few steps."""
    return ("run", "tiny", "--data.sources", str(corpus), "--data.validation_fraction=0.15", *SMALL)
