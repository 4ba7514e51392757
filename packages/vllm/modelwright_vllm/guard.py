"""Runs a command for as long as the process that started the guard lives:

    python -m modelwright_vllm.guard FOLDER COMMAND ...

Standard input is a pipe whose other end the starting process keeps open. When it closes, on purpose or because that
process was killed, the command gets SIGTERM and a time to end. Then the rest of its process group is killed, and
FOLDER, which contains the command's socket, is removed. A signal on the death of the parent alone would not do: it is
sent when the thread that started the child ends, and the server starts children in threads. The guard has one thread,
so its own child has that signal, in case the guard is killed.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process receives when its parent ends."""


def guard(folder: Path, command: Sequence[str]) -> int:
    """Runs a command until it ends or standard input is closed, then removes the folder. Returns the exit code."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with_parent)
        try:
            poll = select.poll()
            # Nobody writes into the pipe: either descriptor is ready only when its other end has ended.
            for descriptor in (sys.stdin.fileno(), os.pidfd_open(child.pid)):
                poll.register(descriptor, select.POLLIN)
            poll.poll()
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        return child.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[2:]))
