"""Runs a command for as long as whoever asked for it lives:

    python -m modelwright_vllm.guard FOLDER COMMAND ...

Standard input is a pipe whose other end the asker keeps open. When it closes, on purpose or because the asker was
killed, the command gets SIGTERM and a time to end. Whatever is left of its process group is killed then, and FOLDER,
which has the command's socket, is removed. A signal on the death of the parent alone would not do: it is sent when the
thread that started the child ends, and the server starts children in threads. The guard has one thread, so its own
child has that signal, for the case that the guard is killed.
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
"""From SIGTERM to SIGKILL."""
PR_SET_PDEATHSIG = 1
"""Of the kernel's prctl.h: the signal that a process gets when its parent has ended."""


def guard(folder: Path, command: Sequence[str]) -> int:
    """Run a command until it ends or standard input is closed; returns its exit code. folder: is removed at the end."""
    try:
        return _run(command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with_parent)
    exited = os.pidfd_open(child.pid)
    try:
        _wait_for_either(sys.stdin.fileno(), exited)
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_either(pipe: int, exited: int) -> None:
    """Until the pipe is closed, or a process has ended. Nobody writes into the pipe."""
    poll = select.poll()
    for descriptor in (pipe, exited):
        poll.register(descriptor, select.POLLIN)
    poll.poll()


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[2:]))
