"""vLLM's server as a child process on a Unix socket that nobody else can open."""

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from modelwright.core.errors import ModelError
from modelwright_vllm.guard import GRACE_S

log = logging.getLogger("modelwright.serve")

BASE_URL = "http://vllm"
"""Where requests through the socket go; the name is that of no host."""

SOCKET = "api.sock"
START_TIMEOUT_S = 1800.0
"""In which vLLM must have loaded the model, compiled it and captured its graphs."""
POLL_S = 0.1
EXIT_MARGIN_S = 5.0
NUM_LAST_LINES = 30


@dataclass(frozen=True, kw_only=True)
class VllmLaunch:
    """How vLLM is started, without the socket. program: its path; folder: of the model."""

    program: str
    folder: Path
    options: Sequence[str]

    def command(self, path: Path) -> list[str]:
        """path: of the socket. It comes last: of an option that is given twice, vLLM takes the last."""
        return [self.program, "serve", str(self.folder), *self.options, f"--uds={path}"]


class VllmProcess:
    """A vLLM that is starting or running. The constructor does not wait; `await_ready` does."""

    def __init__(self, launch: VllmLaunch) -> None:
        self._launch = launch
        self._folder = Path(tempfile.mkdtemp(prefix="modelwright-vllm-"))  # its owner's alone
        self.socket = self._folder / SOCKET
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "modelwright_vllm.guard", str(self._folder), *launch.command(self.socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the server only, which drains first
            env=_environment(),
        )
        self._reader = threading.Thread(target=self._read_log, name="vllm-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The number of the process that guards vLLM."""
        return self._guard.pid

    @property
    def has_ended(self) -> bool:
        return self._guard.poll() is not None

    def await_ready(self) -> None:
        """Wait until vLLM answers. Raises `ModelError` if it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url=BASE_URL, timeout=5) as client:
            while not (_is_listening(self.socket) and _is_healthy(client)):
                if self.has_ended:
                    self._reader.join(EXIT_MARGIN_S)
                    raise ModelError(f"{self._launch.folder}: vLLM has ended while it started: {self._reason()}")
                if time.monotonic() > deadline:
                    text = f"vLLM was not ready within {START_TIMEOUT_S:g} s: {self._reason()}"
                    raise ModelError(f"{self._launch.folder}: {text}")
                time.sleep(POLL_S)

    def end(self) -> None:
        """End it: by itself if it can, else by force."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(GRACE_S + EXIT_MARGIN_S)
        self._guard.kill()
        self._guard.wait()
        self._reader.join(EXIT_MARGIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_log(self) -> None:
        assert self._guard.stdout is not None
        with self._guard.stdout as lines:
            for line in lines:
                if line.strip():
                    self._last_lines.append(line.strip())
                    log.info("vllm: %s", line.rstrip())

    def _reason(self) -> str:
        """The last line that names an error, else the last one."""
        lines = list(self._last_lines) or ["it said nothing"]
        return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])[:500]


def _environment() -> dict[str, str]:
    """This process's, without a key for clients, which nobody can be but this process, and without usage reports."""
    return {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"} | {"VLLM_NO_USAGE_STATS": "1"}


def _is_listening(path: Path) -> bool:
    """vLLM binds its socket before it loads the model, and listens afterwards."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
