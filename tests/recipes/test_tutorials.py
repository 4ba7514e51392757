"""The tutorials, from their first line to the last one: every command and every block of Python, in a new folder.

Small recipes and few steps stand in for the real ones; blocks with a title are the files that the tutorial makes.
"""

import json
import random
import shlex
import signal
import socket
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from doc_pages import blocks, commands_of
from finetune_files import write_examples, write_model
from rank_processes import Started, start_process

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = sorted(
    path.stem for path in (DOCS / "tutorials").glob("*.md") if path.stem not in ("index", "keep-current")
)
SHORT = (
    "--data.stdlib_fraction=0.03", "--pretrain.num_steps=4", "--sft.num_steps=4",
    "--evaluate.max_bytes_per_domain=2000", "--evaluate.multiple_choice.num_questions=5",
)  # fmt: skip
ALIGNED = (
    "--pack.seq_len=64", "--data.validation_fraction=0.2", "--dpo.num_steps=4",
    "--dpo.batch_tokens=256",
)  # fmt: skip
PATIENCE_S = 120.0


class Reader:
    """Someone who follows a tutorial in the folder `place`."""

    def __init__(self, place: Path, port: int) -> None:
        self.place, self.port = place, port
        self.server: Started | None = None
        self.shown: list[str] = []

    def follow(self, page: Path) -> None:
        try:
            for number, block in enumerate(blocks(page)):
                if block.title:
                    self.write(block.title, block.text)
                elif block.language == "python":
                    self.write(f"block-{number}.py", block.text)
                    self.run([f"block-{number}.py"])
                elif block.language == "sh":
                    for line in block.text.splitlines():
                        self.type(line)
        finally:
            self.stop()

    def write(self, name: str, text: str) -> None:
        path = self.place / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace(":8000", f":{self.port}"), encoding="utf-8")

    def type(self, line: str) -> None:
        line = line.replace("8000", str(self.port)).replace("num_layers 8", "num_layers 3")
        words = shlex.split(line, comments=True)
        match words:
            case ["pip", "install", *_]:
                pass  # benchmarks/wheel_check.py installs the wheels
            case ["kill", "%1"]:
                self.stop()
            case ["curl", url]:
                self.shown.append(urllib.request.urlopen(url).read().decode())
            case ["python", *script]:
                self.run(script)
            case ["modelwright", "serve", *rest]:
                assert rest.pop() == "&"
                self.server = start_process("modelwright.cli.main", "serve", *rest, cwd=self.place)
                self.wait()
            case ["modelwright", "run", "quickstart", *rest]:
                more = ALIGNED if "--init-from" in rest else SHORT
                name = [] if "--name" in rest else ["--name", "quickstart"]
                self.run(["modelwright.cli.main", "run", "tiny", *name, *rest, *more])
            case ["modelwright", *rest]:
                self.run(["modelwright.cli.main", *rest])
            case _:
                pytest.fail(f"nobody types {line!r}")

    def run(self, words: list[str]) -> None:
        script = self.place / words[0] if words[0].endswith(".py") else words[0]
        done = start_process(script, *words[1:], cwd=self.place)
        code, output, errors = done.end()
        assert code == 0, f"{words}\n{output[-2000:]}{errors[-2000:]}"
        self.shown.append(output)

    def wait(self) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            with suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{self.port}/health").close()
                return
            time.sleep(0.1)
        pytest.fail("the server does not answer")

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            code, _, errors = self.server.end()
            self.server = None
            assert code in (0, 143), errors


def write_questions(path: Path) -> None:
    """Conversations whose answers have nothing in common, so that cleaning keeps them."""
    dice, lines = random.Random(3), []
    words = [a + b + c for a in ("ka", "lo", "mi", "ru") for b in ("na", "ri", "sto", "va") for c in ("l", "m", "n")]
    for number in range(40):
        question, answer = (" ".join(dice.sample(words, 8)) for _ in range(2))
        turns = [
            {"role": "user", "content": f"{question}?"},
            {"role": "assistant", "content": f"Box {number}: {answer}."},
        ]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """Someone with the model and the records that the tutorials start from."""
    write_model(tmp_path / "models" / "mine")
    write_examples(tmp_path / "examples.jsonl")
    write_questions(tmp_path / "questions.jsonl")
    write_examples(tmp_path / "heldout.jsonl", num_records=10)
    pairs = [{"prompt": f"Say hello {n}.", "chosen": "Hello to you.", "rejected": "What now?"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    with socket.create_server(("localhost", 0)) as probe:
        return Reader(tmp_path, probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(900)  # three short runs after each other on a busy machine
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_works_from_its_first_line_to_the_last(name: str, reader: Reader) -> None:
    if name == "serve":  # it begins with the model of the first tutorial
        reader.type("modelwright run quickstart")
    reader.follow(DOCS / "tutorials" / f"{name}.md")
    runs = reader.place / "runs"
    made = {
        "first-model": (runs / "quickstart/report.html", runs / "more-layers/report.html"),
        "own-data": (runs / "my-text/report.html", reader.place / "my-model/model.safetensors"),
        "fine-tune": (runs / "mine-examples/sft/artifact/model.safetensors", runs / "from-python/report.html"),
        "align": (runs / "aligned/dpo/artifact/model.safetensors", runs / "aligned-again/report.html"),
        "serve": (reader.place / "ask.py",),
    }
    assert [path for path in made[name] if not path.is_file()] == []
    assert all(reader.shown)


def test_the_tutorial_on_updates_has_commands_that_run_elsewhere() -> None:
    """The package of updates runs those of its guides, with a model that has something to forget."""
    proven = {line for name in ("continual", "drift") for line in commands_of(DOCS / f"{name}.md")}
    typed = commands_of(DOCS / "tutorials" / "keep-current.md")
    assert len(typed) >= 5
    assert set(typed) - proven == set()
