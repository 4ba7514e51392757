"""`Sandbox`: runs programs in parallel, each confined and limited. The mechanisms are in `launcher` and `confinement`.

HumanEval's `reliability_guard` and its descendants, which remove functions from Python's modules, do not confine a
program: it can reach the system calls without them.
"""

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from modelwright.core.config import ConfigError, constant
from modelwright_sandbox.frames import read_frame, write_frame

KINDS = ("namespaces", "landlock")
"""Ways to confine programs, the better one first."""

_START = (
    "import sys; sys.path.insert(0, {folder!r}); from modelwright_sandbox.launcher import main; "
    "sys.path.remove({folder!r}); main({kind!r})"
)
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "HOME": "/tmp", "PATH": "/usr/bin:/bin"}
"""Environment of a program. Fixed hashes make the order of sets, and with it the score, reproducible."""
_SELF_TEST = Path(__file__).with_name("self_test.py")
_REMEDY = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; "
    "in Docker --security-opt seccomp=unconfined --security-opt systempaths=unconfined) or use a kernel with Landlock "
    "(Linux 5.13), and install libseccomp (apt install libseccomp2)"
)


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resource limits of a program."""

    cpu_s: int = 4
    """CPU time of each process in seconds."""
    wall_s: float = 12.0
    """Seconds until all processes are killed; the limit bounds waiting, and is long so that a busy machine changes no
    score."""
    memory_bytes: int = 512 << 20
    """Address space of each process, and memory of all of them together."""
    num_processes: int = 16
    """Number of processes and threads at a time."""
    disk_bytes: int = constant(16 << 20)
    """Total size of all files, which are in memory."""
    output_bytes: int = constant(1 << 20)
    """Total size of standard output and standard error."""

    def __post_init__(self) -> None:
        if self.cpu_s < 1 or self.wall_s <= 0 or self.num_processes < 1:
            raise ConfigError("cpu_s, wall_s, num_processes: must be positive, cpu_s and num_processes at least 1")
        if self.memory_bytes < 64 << 20:
            raise ConfigError(f"memory_bytes: Python needs at least 64MiB, got {self.memory_bytes}")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program with its standard input. checks: statements that run after it, in its module."""

    source: str
    stdin: str = ""
    checks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Result of a program."""

    outcome: str
    """`exit`, `error` (exit code other than 0), `memory` (a `MemoryError`, or too much in all processes), `signal`,
    `cpu_time`, `wall_time`, `output`; `not_started` if the machine failed."""
    stdout: str = ""
    stderr: str = ""
    num_passed: int = 0
    """Number of checks that passed."""


class SandboxError(Exception):
    """A failure of the machine to run a program, independent of the program."""


class Sandbox:
    """Runs at most `num_workers` programs at a time. kinds: subset of `KINDS` to try, in order; the first one that
    works is used.

    Raises `ConfigError` with the reasons and the remedy if none works: each is tested with a program that attacks it.
    """

    def __init__(self, limits: SandboxLimits, *, num_workers: int, kinds: Sequence[str] = KINDS) -> None:
        if sys.platform != "linux":
            raise ConfigError(f"code can be run in a sandbox on Linux only, and this is {sys.platform}")
        self.limits = limits
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="sandbox")
        self._idle = queue.SimpleQueue[Launcher]()
        self.close = weakref.finalize(self, _close, self._pool, self._idle)
        """Ends all processes; also called when the object is garbage-collected."""
        reasons = list[str]()
        for self.kind in kinds:
            if not (reason := self._reason_not_to_use()):
                return
            reasons.append(f"{self.kind}: {reason}")
            _close_launchers(self._idle)
        self.close()
        raise ConfigError(f"code cannot be run in a sandbox on this machine ({'; '.join(reasons)}); {_REMEDY}")

    def run(self, programs: Sequence[Program]) -> list[Execution]:
        """Runs the programs; returns one result for each, in order."""
        return list(self._pool.map(self._run_one, programs))

    def _run_one(self, program: Program) -> Execution:
        """Runs a program; a launcher that is killed, for example because memory ran out, is replaced once."""
        reason = ""
        for _ in range(2):
            try:
                try:
                    launcher = self._idle.get_nowait()
                except queue.Empty:
                    launcher = Launcher(self.kind)
                try:
                    execution = launcher.run(program, self.limits)
                except SandboxError:
                    launcher.close()
                    raise
            except (SandboxError, OSError) as error:
                reason = str(error)
                continue
            self._idle.put(launcher)
            return execution
        return Execution(outcome="not_started", stderr=reason)

    def _reason_not_to_use(self) -> str:
        """Returns why this kind does not work here, or ""."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as canary:
            os.chmod(canary.name, 0o666)
            facts = json.dumps([canary.name, self.limits.num_processes])
            try:
                launcher = Launcher(self.kind)
            except (SandboxError, OSError) as error:
                return str(error)
            self._idle.put(launcher)
            execution = self._run_one(Program(source=_SELF_TEST.read_text(encoding="utf-8"), stdin=facts))
        if execution.outcome == "exit" and execution.stdout == "confined\n":
            return ""
        lines = (execution.stdout + execution.stderr).strip().splitlines() or [execution.outcome]
        return f"the self-test says: {lines[-1]}"


class Launcher:
    """A launcher process. Raises `SandboxError` if it reports that this kind does not work, or is gone."""

    def __init__(self, kind: str) -> None:
        folder = str(
            Path(__file__).resolve().parents[1]
        )  # not all of sys.path, so that programs find nothing installed
        command = [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _START.format(folder=folder, kind=kind)]
        self._process = subprocess.Popen(
            command, env=_ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd="/"
        )
        self._jobs, self._results = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        try:
            hello = self._receive()
            if "error" in hello:
                raise SandboxError(hello["error"])
        except SandboxError:
            self.close()
            raise

    def run(self, program: Program, limits: SandboxLimits) -> Execution:
        key = secrets.token_hex(8)
        job = {**asdict(program), "key": key, "limits": asdict(limits)}
        try:
            write_frame(self._jobs, job)
        except OSError as error:
            raise SandboxError(f"the launcher is gone ({error})") from error
        result = self._receive()
        if result["outcome"] == "not_started":
            raise SandboxError(result["error"])
        num_passed = result["report"].splitlines().count(f"{key} 1")
        outcome = result["outcome"]
        if outcome == "exit" and result["code"] != 0:
            last_line = result["stderr"].rstrip().rpartition("\n")[2]
            outcome = "memory" if last_line.startswith("MemoryError") else "error"
        return Execution(outcome=outcome, stdout=result["stdout"], stderr=result["stderr"], num_passed=num_passed)

    def close(self) -> None:
        """Closes the launcher's standard input, at which it ends together with the program that it runs."""
        with contextlib.suppress(OSError):  # a message that could not be sent
            self._jobs.close()
        self._process.wait()
        self._results.close()

    def _receive(self) -> dict[str, Any]:
        message = read_frame(self._results)
        if message is None:
            raise SandboxError("the launcher ended; its standard error says why")
        return message


def _close_launchers(idle: "queue.SimpleQueue[Launcher]") -> None:
    while not idle.empty():
        idle.get().close()


def _close(pool: ThreadPoolExecutor, idle: "queue.SimpleQueue[Launcher]") -> None:
    pool.shutdown(cancel_futures=True)
    _close_launchers(idle)
