"""The launcher: a small process that starts programs in the sandbox, one after another, and watches them; and the code
in the process of a program, which runs like a script, followed by checks if there are any.

It reads programs from its standard input and writes their results to its standard output. Each program runs in a
separate process, forked from the launcher, so that no new interpreter has to start. With namespaces two processes are
in between: a keeper, which creates the namespaces, and the first process of the PID namespace, with whose end the
kernel ends all others in it.
"""

import atexit
import bisect  # noqa: F401 - programs often import these modules; they get them from the launcher's memory
import collections  # noqa: F401
import contextlib
import copy  # noqa: F401
import datetime  # noqa: F401
import decimal  # noqa: F401
import fractions  # noqa: F401
import functools  # noqa: F401
import heapq  # noqa: F401
import io
import itertools  # noqa: F401
import json
import math  # noqa: F401
import os
import random
import re  # noqa: F401
import select
import signal
import statistics  # noqa: F401
import string  # noqa: F401
import sys
import threading
import time
import traceback
import types
import typing  # noqa: F401
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from modelwright_sandbox import linux
from modelwright_sandbox.confinement import CONFINEMENTS, Confinement
from modelwright_sandbox.frames import read_frame, write_frame

REPORT_DESCRIPTOR = 3
"""Descriptor to which the results of checks are written, one per line."""


def run_program(source: str, checks: Sequence[str], key: str) -> NoReturn:
    """Runs a program and ends the process as Python ends a script: threads are joined, and exit handlers called.

    checks: statements that run after the program in its module; each that raises nothing is reported as passed. key:
    prefix of the report's lines, so that a program that writes to all of its descriptors does not pass by chance.
    """
    # Hides the sandbox's modules from the program, which cannot import them again: their folder is not on sys.path.
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]
    # New text streams on descriptors 0, 1 and 2, which the launcher's own streams do not use.
    make: Callable[..., Any] = io.TextIOWrapper
    files = [os.fdopen(number, mode, closefd=False) for number, mode in enumerate(("rb", "wb", "wb"))]
    sys.stdin = sys.__stdin__ = make(files[0], encoding="utf-8", errors="surrogateescape")
    sys.stdout = sys.__stdout__ = make(files[1], encoding="utf-8", errors="surrogateescape")
    sys.stderr = sys.__stderr__ = make(files[2], encoding="utf-8", errors="backslashreplace", line_buffering=True)
    random.seed(0)  # the same program gets the same score again
    module = types.ModuleType("answer" if checks else "__main__")
    sys.modules[module.__name__] = module
    sys.argv = ["answer.py"]
    exit_code = _execute(source, module.__dict__)
    for check in checks if exit_code == 0 else ():
        has_passed = _execute(check, module.__dict__, counts_exit=True) == 0
        os.write(REPORT_DESCRIPTOR, f"{key} {int(has_passed)}\n".encode())
    # The end of a script, in the same order: threads, exit handlers, buffers. Like the processes of `multiprocessing`,
    # it skips the interpreter's own clean-up, which would take longer than most programs.
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the program
            exit_code = exit_code or 1
    os._exit(exit_code)


def _execute(source: str, namespace: dict[str, Any], *, counts_exit: bool = False) -> int:
    """Returns the exit code that a script with this source would have. counts_exit: an exit without error counts as a
    failure, too.
    """
    try:
        exec(compile(source, "answer.py", "exec", dont_inherit=True), namespace)
    except SystemExit as error:
        if counts_exit:
            return 1
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


_CHUNK = 1 << 16
_CHECK_INTERVAL_S = 0.1
_MAX_REPORT_BYTES = 1 << 20
_MAX_DESCRIPTOR = 1 << 20
_COUNTED_MEMORY = ("RssAnon:", "RssShmem:", "VmSwap:")
"""Lines of /proc/PID/status for memory that is not backed by a file."""
_STREAMS = ("stdout", "stderr", "report", "status", "keeper")


@dataclass
class Pipes:
    """Pipes of a program: the launcher's ends and the other ends."""

    ours: dict[str, int] = field(default_factory=dict[str, int])
    theirs: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def create(cls) -> "Pipes":
        pipes = cls()
        pipes.theirs["stdin"], pipes.ours["stdin"] = os.pipe()
        for name in _STREAMS:
            pipes.ours[name], pipes.theirs[name] = os.pipe()
        os.set_blocking(pipes.ours["stdin"], False)
        return pipes


def main(kind: str) -> None:
    """Serves until standard input ends. The first message tells whether the confinement works here."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a PID namespace then ignores it
    # Not closed with the objects: in the process of a program the descriptors are the program's.
    jobs, results = os.fdopen(os.dup(0), "rb", closefd=False), os.fdopen(os.dup(1), "wb", closefd=False)
    os.dup2(2, 1)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # which the confinement hides
    try:
        confinement: Confinement = CONFINEMENTS[kind]()
        confinement.enter()
    except OSError as error:
        write_frame(results, {"error": str(error)})
        return
    write_frame(results, {})
    while (job := read_frame(jobs)) is not None:
        write_frame(results, run_job(job, confinement, jobs, proc))


def run_job(job: Mapping[str, Any], confinement: Confinement, jobs: BinaryIO, proc: int) -> dict[str, Any]:
    pipes = Pipes.create()
    launcher = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        keep(job, confinement, pipes, launcher)
    for descriptor in pipes.theirs.values():
        os.close(descriptor)
    watch = Watch(job, pipes.ours, jobs=jobs.fileno(), proc=proc, keeper=keeper)
    watch.run()
    os.waitpid(keeper, 0)
    return watch.result()


class Watch:
    """Feeds a program, collects its output, and kills it at its limits."""

    def __init__(
        self, job: Mapping[str, Any], descriptors: Mapping[str, int], *, jobs: int, proc: int, keeper: int
    ) -> None:
        self.limits: Mapping[str, Any] = job["limits"]
        self.deadline = time.monotonic() + self.limits["wall_s"]
        self.next_check = time.monotonic() + _CHECK_INTERVAL_S
        self.input = memoryview(job["stdin"].encode("utf-8", "replace"))
        self.names = {descriptor: name for name, descriptor in descriptors.items()}
        self.data = {name: bytearray() for name in _STREAMS}
        self.jobs = jobs
        self.proc = proc
        self.keeper = keeper
        self.reason = ""
        """Why the program was killed."""

    def run(self) -> None:
        """Returns when every process of the program has closed its pipes."""
        poll = select.poll()
        for descriptor, name in self.names.items():
            poll.register(descriptor, select.POLLOUT if name == "stdin" else select.POLLIN)
        poll.register(self.jobs, select.POLLIN)
        while any(name != "stdin" for name in self.names.values()):
            # Time and memory of all processes together, at intervals; the kernel enforces the limits of each.
            now = time.monotonic()
            if not self.reason and now >= self.next_check:
                self.next_check = now + _CHECK_INTERVAL_S
                if now > self.deadline:
                    self._kill("wall_time")
                elif memory_of_tree(self.keeper, self.proc) > self.limits["memory_bytes"]:
                    self._kill("memory")
            for descriptor, _ in poll.poll(_CHECK_INTERVAL_S * 1000):
                if descriptor == self.jobs:  # nobody waits for the result any more
                    self._kill("abandoned")
                    os._exit(1)
                if not self._transfer(descriptor):
                    poll.unregister(descriptor)
                    os.close(descriptor)
                    del self.names[descriptor]
        for descriptor in self.names:
            os.close(descriptor)

    def _transfer(self, descriptor: int) -> bool:
        """Reads or writes once; returns False at the end."""
        name = self.names[descriptor]
        if name == "stdin":
            try:
                self.input = self.input[os.write(descriptor, self.input[:_CHUNK]) :]
            except BlockingIOError:
                return True
            except BrokenPipeError:
                return False
            return len(self.input) > 0
        chunk = os.read(descriptor, _CHUNK)
        # Output after the kill is read, so that the pipes reach their end, but not kept.
        if not self.reason:
            self.data[name] += chunk
        num_bytes = len(self.data["stdout"]) + len(self.data["stderr"])
        if num_bytes > self.limits["output_bytes"] or len(self.data["report"]) > _MAX_REPORT_BYTES:
            self._kill("output")
        return bool(chunk)

    def _kill(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        # The keeper's death ends the first process, too, but only the first process's own is waited for.
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(_first_message(self.data["keeper"]).get("pid", self.keeper), signal.SIGKILL)

    def result(self) -> dict[str, Any]:
        keeper, status = _first_message(self.data["keeper"]), _first_message(self.data["status"])
        texts = {name: bytes(self.data[name]).decode("utf-8", "replace") for name in ("stdout", "stderr", "report")}
        if "error" in keeper or "error" in status:
            return {"outcome": "not_started", "error": keeper.get("error") or status["error"], **texts}
        code = status.get("code", -signal.SIGKILL)
        outcome = self.reason or "exit"
        if not self.reason and code < 0:
            used_up = code == -signal.SIGXCPU or status.get("cpu_s", 0.0) >= self.limits["cpu_s"]
            outcome = "cpu_time" if used_up else "signal"
        return {"outcome": outcome, "code": code, **texts}


def memory_of_tree(process: int, proc: int) -> int:
    """Returns the bytes in memory or swap, not backed by files, of a process and its descendants. Pages that a fork
    shares count once for each process. proc: descriptor of the folder /proc.

    Processes that end in the meantime count 0, and so do descendants on a kernel without CONFIG_PROC_CHILDREN.
    """
    total, pending = 0, [process]
    while pending:
        number = pending.pop()
        lines = _read(f"{number}/status", proc).splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_COUNTED_MEMORY))
        pending += map(int, _read(f"{number}/task/{number}/children", proc).split())
    return total


def _read(name: str, folder: int) -> str:
    try:
        descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _first_message(data: bytearray) -> dict[str, Any]:
    return json.loads(bytes(data).partition(b"\n")[0] or b"{}")


def keep(job: Mapping[str, Any], confinement: Confinement, pipes: Pipes, launcher: int) -> NoReturn:
    """Runs the keeper: it forks the program's first process, tells the launcher its id, and outlives it.

    The keeper dies with the launcher, and the first process with the keeper. The pipe between the two tells the first
    process whether the keeper was still alive after it asked to be killed along with it.
    """
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
    for descriptor in pipes.ours.values():
        os.close(descriptor)
    told = pipes.theirs["keeper"]
    try:
        confinement.prepare(job["limits"])
        alive, held = os.pipe()
        first = os.fork()
    except OSError as error:
        os.write(told, json.dumps({"error": str(error)}).encode())
        os._exit(1)
    if first == 0:
        os.close(held)
        os.close(told)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([alive], [], [], 0)[0]:
            os._exit(1)
        if confinement.has_processes:
            be_first(job, confinement, pipes)
        begin(job, confinement, pipes)
    os.write(told, json.dumps({"pid": first}).encode())
    os.close(told)
    for name in ("stdin", "stdout", "stderr", "report"):
        os.close(pipes.theirs[name])
    report_end(first, pipes.theirs["status"], is_program=not confinement.has_processes)
    os._exit(0)


def be_first(job: Mapping[str, Any], confinement: Confinement, pipes: Pipes) -> NoReturn:
    """Runs the first process of a PID namespace: it adopts orphans of the program until the program itself ends."""
    program = os.fork()
    if program == 0:
        begin(job, confinement, pipes)
    for name in ("stdin", "stdout", "stderr", "report"):
        os.close(pipes.theirs[name])
    report_end(program, pipes.theirs["status"], is_program=True)
    os._exit(0)


def report_end(process: int, told: int, *, is_program: bool) -> None:
    """Waits for a child, and writes how it ended if it is the program. Other children are adopted ones."""
    if not is_program:
        os.close(told)
    while True:
        number, status, usage = os.wait3(0)
        if number == process:
            break
    if is_program:
        ended = {"code": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}
        os.write(told, json.dumps(ended).encode() + b"\n")


def begin(job: Mapping[str, Any], confinement: Confinement, pipes: Pipes) -> NoReturn:
    """Becomes the program, in this order: its pipes, the confinement, closing everything else that is open,
    its code.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr", "report")):
        os.dup2(pipes.theirs[name], number, inheritable=number < REPORT_DESCRIPTOR)
    try:
        confinement.confine(job["limits"])
    except OSError as error:
        os.write(pipes.theirs["status"], json.dumps({"error": str(error)}).encode() + b"\n")
        os._exit(1)
    # An open folder of the launcher would be a way out of the sandbox.
    os.closerange(REPORT_DESCRIPTOR + 1, _MAX_DESCRIPTOR)
    run_program(job["source"], job["checks"], job["key"])
