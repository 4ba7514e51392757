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

from federated_commands import free_port

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

    def run(self, name: str, client: str, server: str, config: Mapping[str, str]) -> str:
        """What `flwr run --stream` prints for an app of two files; returns when the run is over.

        client, server: the files' text, each of which defines `app`.
        """
        folder = self.folder / name
        folder.mkdir()
        (folder / f"{name}_client.py").write_text(client)
        (folder / f"{name}_server.py").write_text(server)
        values = "\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "1.0.0"\ndependencies = []\n\n'
            '[tool.flwr.app]\npublisher = "tests"\n\n'
            f'[tool.flwr.app.components]\nserverapp = "{name}_server:app"\nclientapp = "{name}_client:app"\n\n'
            f"[tool.flwr.app.config]\n{values}\n"
        )
        done = subprocess.run(
            [PROGRAMS / "flwr", "run", folder, "here", "--stream"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout + done.stderr


@contextmanager
def federation(folder: Path, nodes: Mapping[str, Mapping[str, object]]) -> Iterator[Federation]:
    """A SuperLink and a SuperNode for each client with its configuration; all of them are gone in the end."""
    home = folder / "flower"
    home.mkdir(parents=True)
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    python = os.pathsep.join([*filter(None, sys.path)])
    environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(home), "PATH": path, "PYTHONPATH": python}
    commands = {"superlink": ["flower-superlink", "--insecure", "--port", str(port), "--host", "127.0.0.1"]}
    for name, config in nodes.items():
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        commands[name] = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
        commands[name] += ["--port", str(free_port()), "--node-config", words]
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
            stack.callback(_end, process)
            if name == "superlink":
                _wait_for(port)
        yield Federation(folder, environment)


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
