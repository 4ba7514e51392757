"""A tool in a virtual environment of its own: installing it, and the seconds until it answers.

Its home folder is its own as well, so that nothing which an earlier start has cached helps it.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelwright.core.config import ModelwrightError

QUESTION = "Which arguments does json.dumps take?"
MESSAGES = [{"role": "user", "content": QUESTION}]
START_TIMEOUT_S, INSTALL_TIMEOUT_S = 300.0, 1800.0
LEFT_OUT = ("PIP_", "PYTHON", "VIRTUAL_ENV", "OMP_", "MKL_", "XDG_", "HF_")
"""Beginnings of the variables that no tool gets: they are of this environment, and a new user does not set them."""


class Environment:
    """A virtual environment in `folder`. cwd: where its programs run."""

    def __init__(self, folder: Path, cwd: Path) -> None:
        self.folder, self.cwd = folder, cwd
        path = os.environ.get("PATH", os.defpath).split(os.pathsep)
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)} | {
            "PATH": os.pathsep.join(one for one in path if not Path(one).is_relative_to(sys.prefix)),
            "HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_CACHE_DIR": str(folder.parent / "pip"),
        }

    def program(self, words: Sequence[str]) -> list[str]:
        return [str(self.folder / "bin" / words[0]), *words[1:]]

    def install(self, packages: Sequence[str], links: Sequence[Path], *options: str) -> float:
        """Install from files in the folders `links` alone, with the pip that this Python brings into an environment,
        which is made if it is not there. Returns the seconds.
        """
        started = time.perf_counter()
        if not self.folder.exists():
            (self.folder / "home").mkdir(parents=True)
            run([sys.executable, "-m", "venv", str(self.folder)], self.variables)
        words = [*options, *(f"--find-links={link}" for link in links), *packages]
        run(self.program(["python", "-m", "pip", "install", "--quiet", *words]), self.variables)
        return time.perf_counter() - started

    def first_answer(self, words: Sequence[str], before: str = "\n") -> tuple[float, str]:
        """Ask on standard input and return the seconds until the first text of the answer, which follows `before`, and
        the answer's first line. Raises `ModelwrightError` with the last lines of a program that fails or says nothing.
        """
        command, seconds, output, answer = self.program(words), 0.0, b"\n", b""
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        with tempfile.TemporaryFile() as errors:
            started = time.perf_counter()
            with subprocess.Popen(command, stderr=errors, env=self.variables, cwd=self.cwd, **options) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                limit = threading.Timer(START_TIMEOUT_S, process.kill)
                limit.start()
                with suppress(BrokenPipeError):  # of a program that has ended, as its exit code says
                    process.stdin.write(f"{QUESTION}\n".encode())
                process.stdin.close()
                while part := process.stdout.read(1 << 16):
                    now = time.perf_counter()
                    output += part
                    answer = output.partition(before.encode())[2].strip()
                    seconds = seconds or (now - started if answer else 0.0)
            limit.cancel()
            errors.seek(0)
            if process.returncode or not answer:
                raise ended(command, process.returncode, (output + errors.read()).decode(errors="replace"))
        return seconds, answer.splitlines()[0].decode(errors="replace")

    def first_reply(self, words: Sequence[str], model: str) -> float:
        """Start a server at `{port}` and return the seconds until its first answer, of one token; ends the server."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [word.replace("{port}", str(port)) for word in self.program(words)]
        body = json.dumps({"model": model, "messages": MESSAGES, "max_tokens": 1, "temperature": 0}).encode()
        url, header = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
        with tempfile.TemporaryFile() as log:
            started = time.perf_counter()
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.variables, cwd=self.cwd)
            try:
                while process.poll() is None and time.perf_counter() < started + START_TIMEOUT_S:
                    try:
                        request = urllib.request.Request(url, body, header)
                        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as reply:
                            json.load(reply)["choices"][0]["message"]
                            return time.perf_counter() - started
                    except urllib.error.HTTPError as error:
                        if error.code != 503:  # the model is being loaded
                            raise ended(command, error.code, error.read().decode(errors="replace")) from None
                    except OSError:
                        pass  # it does not listen yet
                    time.sleep(0.02)
                log.seek(0)
                raise ended(command, process.poll(), log.read().decode(errors="replace"))
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
                process.wait()


def run(command: Sequence[str], variables: Mapping[str, str] = os.environ) -> None:
    """Run a program to its end. Raises `ModelwrightError` with its last lines if it fails or takes too long."""
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, env=variables, text=True, timeout=INSTALL_TIMEOUT_S, check=False, **output)
    except subprocess.TimeoutExpired:
        raise ended(command, None, f"it took more than {INSTALL_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise ended(command, done.returncode, done.stdout)


def ended(command: Sequence[str], code: int | None, text: str) -> ModelwrightError:
    """Return the error for a program that gave no answer, with its last lines, in which the name of an index may be."""
    words, lines = " ".join([Path(command[0]).name, *command[1:]]).split(), text.strip().splitlines()
    last = re.sub(r"https?://\S+", "URL", " / ".join(" ".join(line.split()) for line in lines[-5:]))[-600:]
    return ModelwrightError(f"{' '.join(words)[:120]}: ended with {code} and no answer: {last}")
