"""`subprocess.Popen` that forks our own commands from a process that has imported them already.

An interpreter takes seconds of a core to import PyTorch and a command, and what a test has the command do often takes
less. Only what `FORKED` names is forked; every other command is started as ever. A forked command is a process of its
own, with the environment, folder, files and session that were asked for, and dies like any other.
"""

import gc
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.context import ForkServerProcess
from typing import Any
from unittest import mock

SPAWNING_POPEN = subprocess.Popen
"""The class that forks nothing, for what waits for its child by itself (`os.wait4`)."""
FORKED = ("modelwright.cli.main", "modelwright.serve.engines.process")
"""Modules that are started by `python -m`."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Descriptor:
    """A file descriptor; the process that it is sent to has it under another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _number, (reduction.DupFd(self.number),)


def _number(sent: Any) -> int:
    return sent.detach()


@dataclass(frozen=True)
class _Command:
    """What a process is to become."""

    words: Sequence[str]
    """Name of the module and arguments."""
    environment: dict[str, str]
    folder: str
    has_own_session: bool
    descriptors: dict[int, Any]
    """By the number that it is to have, what it is here."""


class ForkedPopen(SPAWNING_POPEN):
    """The process of the tests has threads, so a server forks for it (`rank_processes.fork_context`). A process that
    the server has forked forks by itself: it stays the parent of what it starts.
    """

    _process: ForkServerProcess | None = None

    def _execute_child(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        words = _words_of(args)
        if not words or preexec_fn is not None:
            super()._execute_child(  # pyright: ignore[reportAttributeAccessIssue]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
            )
            return
        ends = more[3:9]  # pairs of a read and a write end for the input, the output and the errors; -1 without a pipe
        own = (ends[0], ends[3], ends[5])
        numbers = {number: here if here != -1 else number for number, here in enumerate(own)}
        command = _Command(
            words=words,
            environment=dict(os.environ if env is None else env),
            folder=os.getcwd() if cwd is None else os.fspath(cwd),
            has_own_session=bool(more[14]),
            descriptors=numbers | {number: number for number in pass_fds},
        )
        if multiprocessing.parent_process() is None:
            self._fork_by_server(command)
        else:
            self._fork(command)
        self._child_created = True
        self._close_pipe_fds(*ends)  # pyright: ignore[reportAttributeAccessIssue]

    def _fork_by_server(self, command: _Command) -> None:
        from rank_processes import fork_context

        sent = {number: Descriptor(here) for number, here in command.descriptors.items()}
        call = _Command(**{**vars(command), "descriptors": sent})
        self._process = fork_context().Process(target=_become, args=(call,), daemon=True)
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # the first start is that of the server, too
            self._process.start()
        self.pid = self._process.pid

    def _fork(self, command: _Command) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                _forget_parent(command.descriptors.values())
                code = _exit_code(command)
            finally:
                os._exit(code)  # what the parent would do at its end is not for this process

    def _internal_poll(self, _deadstate: Any = None) -> int | None:
        if self._process is None:
            return super()._internal_poll(_deadstate)  # pyright: ignore[reportAttributeAccessIssue]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # pyright: ignore[reportAttributeAccessIssue]
            try:
                self.returncode = self._process.exitcode
            finally:
                self._waitpid_lock.release()  # pyright: ignore[reportAttributeAccessIssue]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Process and status as `os.waitpid` returns them."""
        if self._process is None:
            return super()._try_wait(wait_flags)  # pyright: ignore[reportAttributeAccessIssue]
        self._process.join(0.0 if wait_flags == os.WNOHANG else None)
        code = self._process.exitcode
        if code is None:
            return 0, 0
        return self.pid, -code if code < 0 else code << 8


def _words_of(args: Any) -> list[str]:
    """Module and arguments of a command that is to be forked; empty for any other."""
    words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else []
    options = 2 if words[1:2] == ["-u"] else 1
    is_ours = words[:1] == [sys.executable] and words[options : options + 1] == ["-m"]
    return words[options + 1 :] if is_ours and words[options + 1] in FORKED else []


def _forget_parent(descriptors: Collection[int]) -> None:
    """Leave nothing of the process that this one was forked from that an interpreter would not have left, either."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in descriptors:
            try:
                os.close(number)
            except OSError:
                continue  # the folder's own
    signal.set_wakeup_fd(-1)
    for number in STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.disable(logging.NOTSET)


def _exit_code(command: _Command) -> int:
    try:
        _run(command)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _become(command: _Command) -> None:
    """The life of a process that the server has forked."""
    from rank_processes import end_with_parent

    gc.freeze()  # otherwise every full collection copies the pages of all modules that were imported
    end_with_parent()
    _run(command)


def _run(command: _Command) -> None:
    import torch

    from impatient import look_once

    if command.has_own_session:
        os.setsid()
    look_once()
    fork_commands()
    words = list(command.words)
    for number, here in command.descriptors.items():
        if number <= 2:
            os.dup2(here, number)
        elif here != number:
            words = [str(here) if word == str(number) else word for word in words]
    os.environ.clear()
    os.environ.update(command.environment)
    os.chdir(command.folder)
    torch.set_num_threads(int(command.environment.get("OMP_NUM_THREADS", "1")))
    sys.argv = words
    with open(0, closefd=False) as sys.stdin:
        sys.modules.pop(words[0], None)  # it begins anew
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def fork_commands() -> None:
    """From now on this process forks what `FORKED` names."""
    subprocess.Popen = ForkedPopen
    if elastic := sys.modules.get("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"):
        elastic.Popen = ForkedPopen  # pyright: ignore[reportAttributeAccessIssue]
