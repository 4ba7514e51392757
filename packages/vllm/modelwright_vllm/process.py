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

from modelwright.core.config import ModelError
from modelwright_vllm.guard import GRACE_S

log = logging.getLogger("modelwright.serve")

BASE_URL = "http://vllm"
"""Base of the URLs of requests through the socket; the host name is not used."""

SOCKET = "api.sock"
START_TIMEOUT_S = 1800.0
"""Seconds in which vLLM must have loaded the model, compiled it and captured its graphs."""
POLL_S = 0.1
EXIT_MARGIN_S = 5.0
NUM_LAST_LINES = 30


@dataclass(frozen=True, kw_only=True)
class VllmLaunch:
    """Arguments of vLLM's start, without the socket. program: path of vLLM; folder: folder of the model."""

    program: str
    folder: Path
    options: Sequence[str]


class VllmProcess:
    """A vLLM that is starting or running. The constructor does not wait; `await_ready` does."""

    def __init__(self, launch: VllmLaunch) -> None:
        self._launch = launch
        self._folder = Path(tempfile.mkdtemp(prefix="modelwright-vllm-"))  # its owner's alone
        self.socket = self._folder / SOCKET
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        # The socket comes last: if an option is given twice, vLLM takes the last.
        command = [launch.program, "serve", str(launch.folder), *launch.options, f"--uds={self.socket}"]
        # A key for clients would keep this process out, the only client.
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "modelwright_vllm.guard", str(self._folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the server only, which drains first
            env=environment | {"VLLM_NO_USAGE_STATS": "1"},
        )
        self._reader = threading.Thread(target=self._read_log, name="vllm-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Id of the process that guards vLLM."""
        return self._guard.pid

    @property
    def has_ended(self) -> bool:
        return self._guard.poll() is not None

    def await_ready(self) -> None:
        """Waits until vLLM answers. Raises `ModelError` if it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url=BASE_URL, timeout=5) as client:
            while not self._answers(client):
                if self.has_ended:
                    self._reader.join(EXIT_MARGIN_S)
                    raise ModelError(f"{self._launch.folder}: vLLM has ended while it started: {self._reason()}")
                if time.monotonic() > deadline:
                    text = f"vLLM was not ready within {START_TIMEOUT_S:g} s: {self._reason()}"
                    raise ModelError(f"{self._launch.folder}: {text}")
                time.sleep(POLL_S)

    def end(self) -> None:
        """Ends vLLM, gracefully if possible, else by force."""
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
        """Returns the last line that names an error, else the last line."""
        lines = list(self._last_lines) or ["it said nothing"]
        return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])[:500]

    def _answers(self, client: httpx.Client) -> bool:
        # vLLM binds its socket before it loads the model, and listens afterwards.
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket)) != 0:
                return False
        try:
            return client.get("/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False
