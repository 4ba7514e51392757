"""A Flower federation of real processes on this machine: a SuperLink, SuperNodes, and runs of apps."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from warm_superexec import install

PROGRAMS = Path(sys.executable).parent
PATIENCE_S = 120.0
"""Far more than anything here takes: a machine that is busy with other things must fail no test."""
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Federation:
    """A SuperLink with its SuperNodes, each a process on this machine."""

    folder: Path
    environment: Mapping[str, str]

    processes: Mapping[str, subprocess.Popen[bytes]]
    """By the names of the nodes, and `superlink`."""

    def start(self, app: Path, output: Path) -> subprocess.Popen[bytes]:
        """`flwr run --stream` of an app; its output goes to a file."""
        words = [PROGRAMS / "flwr", "run", app, "here", "--stream"]
        with open(output, "wb") as file:
            return subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def kill(self, name: str) -> None:
        """Kill a node, with the process that trains."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)


@contextmanager
def federation(folder: Path, nodes: Mapping[str, Mapping[str, object]]) -> Iterator[Federation]:
    """A SuperLink and a SuperNode for each client with its configuration; all of them are gone in the end."""
    home = folder / "flower"
    home.mkdir(parents=True)
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    path = os.pathsep.join([str(install(home / "bin")), str(PROGRAMS), os.environ["PATH"]])
    python = os.pathsep.join([*filter(None, sys.path)])
    environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(home), "PATH": path, "PYTHONPATH": python}
    commands = {"superlink": ["flower-superlink", "--insecure", "--port", str(port), "--host", "127.0.0.1"]}
    for name, config in nodes.items():
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        commands[name] = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
        commands[name] += ["--port", str(free_port()), "--node-config", words]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for name, (program, *arguments) in commands.items():
            output = stack.enter_context(open(folder / f"{name}.txt", "wb"))
            process = subprocess.Popen(
                [PROGRAMS / program, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            processes[name] = process
            stack.callback(_end, process)
            if name == "superlink":
                _wait_for(port)
        yield Federation(folder, environment, processes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _wait_for(port: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
