"""docs/tutorials/fine-tune.md as someone follows it who has installed the wheel: its five commands, and its Python."""

import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from doc_pages import blocks

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "fine-tune.md"
PATIENCE_S = 240.0


def follow(place: Path, python: str, program: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """What each command has printed, by its name, and `python` for the block of Python. place: a folder with the model,
    the examples and the held-out ones; python: the interpreter; program: the words that start `modelwright`.
    """
    with socket.create_server(("localhost", 0)) as probe:
        port = str(probe.getsockname()[1])
    told: dict[str, str] = {}
    server: subprocess.Popen[str] | None = None

    def started(words: Sequence[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            words, cwd=place, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def ran(words: Sequence[str]) -> str:
        process = started(words)
        output, _ = process.communicate()
        assert process.returncode == 0, f"{words}\n{output[-3000:]}"
        return output

    try:
        for number, block in enumerate(blocks(PAGE)):
            text = block.text.replace(":8000", f":{port}").replace("--port 8000", f"--port {port}")
            if block.title:
                (place / block.title).write_text(text)
            elif block.language == "python":
                assert len(text.splitlines()) <= 10
                (place / f"lines-{number}.py").write_text(text)
                told["python"] = ran([python, f"lines-{number}.py"])
            for line in text.splitlines() if block.language == "sh" else ():
                match shlex.split(line, comments=True):
                    case ["pip", "install", *_]:
                        pass  # it is installed
                    case ["modelwright", "serve", *words, "&"]:
                        server = started([*program, "serve", *words])
                        wait_for(server, port)
                    case ["modelwright", *words]:
                        told[words[0]] = ran([*program, *words])
                    case ["python", script]:
                        told["ask"] = ran([python, script])
                    case ["kill", "%1"]:
                        assert server is not None
                        server.send_signal(signal.SIGTERM)
                        output, _ = server.communicate()
                        assert server.returncode in (0, 143), output
                        told["serve"] = output
                    case words:
                        raise AssertionError(f"nobody types {words}")
    finally:
        if server is not None and server.poll() is None:
            server.kill()
    return told


def wait_for(server: "subprocess.Popen[str]", port: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up and server.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(f"http://localhost:{port}/health").close()
            return
        time.sleep(0.2)
    raise AssertionError("the server does not answer")


def fault_of_tutorial(told: Mapping[str, str]) -> str:
    """What is missing in what the commands have printed; "" for nothing."""
    # What a small model answers may be blank; that the server was asked is in `ask`, which ends with a line feed.
    wanted = {"finetune": "Perplexity of answers", "compare": "perplexity", "python": "http://", "ask": "\n"}
    return ", ".join(name for name, text in wanted.items() if text not in told.get(name, ""))
