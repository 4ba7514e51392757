"""A new user with the wheel alone: docs/tutorials/fine-tune.md, first its five commands, then the ten lines of Python.

The wheel is built from this checkout and unpacked into a folder of its own; the libraries that pip would fetch are
those of this environment. benchmarks/wheel_check.py has pip fetch them, into empty environments.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from doc_pages import blocks
from finetune_files import write_examples, write_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "fine-tune.md"
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel, in a folder to import from."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # building writes into the checkout, so a copy of it is built
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source]
    subprocess.run([*pip, *map(str, build)], check=True, capture_output=True)
    (wheel,) = folder.glob("modelwright-*.whl")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", folder / "site", wheel]
    subprocess.run([*pip, *map(str, install)], check=True, capture_output=True)
    return folder / "site"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_with_the_wheel_alone(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    write_model(tmp_path / "models" / "mine")
    write_examples(tmp_path / "examples.jsonl")
    write_examples(tmp_path / "heldout.jsonl", num_records=10)
    with socket.create_server(("localhost", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(site / "bin" / "modelwright")]
    typed, server, told = [], None, {}

    def started(words: list[str]) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(words, cwd=tmp_path, env=environment, text=True, **pipes)

    def ran(words: list[str]) -> str:
        process = started(words)
        output, _ = process.communicate()
        assert process.returncode == 0, f"{words}\n{output[-3000:]}"
        return output

    where = ran([sys.executable, "-c", "import modelwright; print(modelwright.__file__)"])
    assert Path(where.strip()).is_relative_to(site), "not the checkout"
    try:
        for number, block in enumerate(blocks(PAGE)):
            text = block.text.replace(":8000", f":{port}").replace("--port 8000", f"--port {port}")
            if block.title:
                (tmp_path / block.title).write_text(text)
            elif block.language == "python":
                assert len(text.splitlines()) <= 10
                (tmp_path / f"lines-{number}.py").write_text(text)
                told["python"] = ran([sys.executable, f"lines-{number}.py"])
            elif block.language == "sh":
                for words in (shlex.split(line, comments=True) for line in text.splitlines()):
                    typed.append(words[0])
                    if words[-1] == "&":
                        server = started([*program, *words[1:-1]])
                        wait_for(port)
                    elif words[0] == "modelwright":
                        told[words[1]] = ran([*program, *words[1:]])
                    elif words[0] == "python":
                        told["ask"] = ran([sys.executable, *words[1:]])
                    elif words[0] == "kill":
                        assert server is not None
                        server.send_signal(signal.SIGTERM)
                        output, _ = server.communicate()
                        assert server.returncode in (0, 143), output
                    else:
                        assert words[:2] == ["pip", "install"]
    finally:
        if server is not None and server.poll() is None:
            server.kill()
    assert typed == ["pip", "modelwright", "modelwright", "modelwright", "python", "kill"]
    assert "Perplexity of answers" in told["finetune"]
    assert "perplexity" in told["compare"]
    assert told["ask"].strip()
    assert "http://" in told["python"]
    assert (tmp_path / "runs/from-python/sft/artifact/model.safetensors").is_file()


def wait_for(port: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        with suppress(OSError):
            urllib.request.urlopen(f"http://localhost:{port}/health").close()
            return
        time.sleep(0.2)
    pytest.fail("the server does not answer")
