"""`flower-superexec`, which starts a process for each message to a client, with clients that are forked.

Each `flwr-clientapp` imports PyTorch and the training loop, which takes seconds, to answer one message; a round with
secure aggregation has four. Here they are forked from a process that has imported both and has used neither threads
nor gRPC. In all else each is a process of its own in the group of its SuperNode, and is killed with it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

FORKED = "flwr-clientapp"


def install(folder: Path) -> Path:
    """Write the program into a folder, which has to come first on PATH."""
    folder.mkdir(parents=True)
    program, paths = folder / "flower-superexec", [str(Path(__file__).parent), *sys.path]
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {paths!r}\nfrom warm_superexec import main\nmain()\n"
    )
    program.chmod(0o755)
    return folder


def serve(commands: IO[str]) -> None:
    """Fork a client for each command, until nobody is left that could write one."""
    from flwr.supernode.cli import flwr_clientapp

    import modelwright_federated.client  # noqa: F401  (what the clients will import)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries those that have ended
    for line in commands:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.argv = json.loads(line)
            flwr_clientapp()
            return


def main() -> None:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        with os.fdopen(reading) as commands:
            serve(commands)
        return
    os.close(reading)
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    def start(words: Sequence[str], **options: Any) -> None:
        if words[0] == FORKED:
            os.write(writing, (json.dumps(list(words)) + "\n").encode())
        else:
            subprocess.Popen(words, **options)

    subprocess_executor.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    flower_superexec()
