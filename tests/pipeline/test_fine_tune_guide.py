"""Every command of docs/guides/fine-tune.md, in its order, as a new user would type it."""

import io
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from finetune_files import write_examples, write_model
from modelwright.pipeline import resolve
from rank_processes import start_process

Command = Callable[..., subprocess.CompletedProcess[str]]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fine-tune.md"
PATIENCE_S = 120.0


def commands() -> list[str]:
    """The lines of the page's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.mark.slow
def test_every_command_does_what_the_page_says(
    inside: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "BUDGET_S", 0.05)  # for what is measured of the machine
    monkeypatch.setattr(sys, "stdin", io.StringIO("Box 7: which color?\n"))
    write_model(tmp_path / "models" / "my-model")
    write_examples(tmp_path / "examples.jsonl")
    write_examples(tmp_path / "heldout.jsonl", num_records=10)
    write_task(tmp_path / "tasks")
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    served = None
    shown: dict[str, str] = {}
    for line in commands():
        words = shlex.split(line.replace("8000", str(port)).replace("--minutes 5", "--minutes 0.4"))
        if words[0] == "curl":
            assert served is not None
            shown[line] = answer(words)
            served.send_signal(signal.SIGTERM)
            served.end()
        elif words[1] == "serve":
            served = start_process("modelwright.cli.main", *words[1:], cwd=tmp_path)
            wait_for(port)
        else:
            done = inside(*words[1:])
            while fewest := re.search(r"are too few .*; give at least ([\d.]+)", done.stderr):  # on a busy machine
                words[words.index("--minutes") + 1] = str(2 * float(fewest[1]))
                done = inside(*words[1:])
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            shown[line] = done.stdout
    assert {shlex.split(line)[1] for line in shown if line.startswith("modelwright")} == {
        "finetune", "show", "compare", "evaluate", "chat", "export"
    }  # fmt: skip
    assert "Perplexity of answers" in shown[commands()[2]]
    folder = tmp_path / "runs" / "my-model-examples" / "sft" / "artifact"
    assert (folder / "model.safetensors").is_file()
    check_card(tmp_path / "exported" / "README.md")
    for name in ("my-model.gguf", "my-model-q8.gguf"):
        assert (tmp_path / name).read_bytes()[:4] == b"GGUF"
    assert (tmp_path / "my-model-onnx" / "model.onnx").is_file()
    assert "boxes" in json.loads((folder.parents[1] / "lm-eval-tasks.json").read_text())["results"]
    assert "FROM ./my-model-q8.gguf" in (tmp_path / "Modelfile").read_text()


def write_task(folder: Path) -> None:
    """The page's task, with the line of data that it shows."""
    text = GUIDE.read_text(encoding="utf-8")
    (task,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    (line,) = re.findall(r"A line of `tasks/boxes.jsonl` is `(\{.*?\})`", text)
    folder.mkdir()
    (folder / "boxes.yaml").write_text(task)
    (folder / "boxes.jsonl").write_text(f"{line}\n" * 3)


def answer(words: list[str]) -> str:
    """What the server says, by curl or, where there is none, by the same request."""
    if shutil.which("curl"):
        output = subprocess.run([words[0], "-s", *words[1:]], check=True, capture_output=True, text=True).stdout
    else:
        body = words[words.index("-d") + 1].encode()
        request = urllib.request.Request(words[1], body, {"Content-Type": "application/json"})
        output = urllib.request.urlopen(request).read().decode()
    reply = json.loads(output)
    assert reply["choices"][0]["message"]["role"] == "assistant", output
    return output


def wait_for(port: int) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health").close()
            return
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def check_card(path: Path) -> None:
    """Front matter as the hub reads it; data, settings, measured quality and lineage from the run."""
    front, text = path.read_text().removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["modelwright", "sft"],
        "base_model": "my-model",
    }
    assert "- Sources: examples.jsonl" in text
    assert re.search(r"- Conversations: \d+ for training, \d+ held out", text)
    assert "adamw at 0.001, warmup_linear, weight decay 0.01, 4 accumulated" in text
    assert re.search(r"- Perplexity of answers [\d.]+ \(initial model: [\d.]+\)", text)
    assert re.search(r"- sft: sha256 [0-9a-f]{64}", text)
    assert str(path.parents[1]) not in text
