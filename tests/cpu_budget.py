"""The CPU time of the fast tests, against a limit.

A timing never fails a single test. This is a sum over all of them, of CPU time: other jobs of the machine stretch wall
time without bound, and CPU time only as far as they share a core's units, for which the limit leaves room. A suite
grows by seconds that no single test is to blame for, so only the sum can be held. Where the limit bites, tests become
smaller, share what they prepare, or are slow ones.
"""

import json
import multiprocessing.forkserver
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

LIMITS = Path(__file__).with_name("architecture") / "limits.json"
NAME = "CPU seconds of the fast tests"
"""Its name among the limits, which may only ever be lowered."""
PATIENCE_S = 10.0
"""How long a process of the tests waits for its fork server to end."""


def limit_s() -> float:
    return json.loads(LIMITS.read_text(encoding="utf-8"))[NAME]


def is_full(config: pytest.Config) -> bool:
    """Whether these are the fast tests, and all of them: neither a file nor a name was asked for."""
    chosen = config.option.keyword or config.option.deselect or getattr(config.option, "lf", False)
    is_whole_tree = config.args_source is not pytest.Config.ArgsSource.ARGS
    return config.option.markexpr == "not slow" and is_whole_tree and not chosen


def used_s() -> float:
    """CPU seconds of this process, and of every one below it that was waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def end_fork_server() -> None:
    """Most processes of the tests are forked by a server, whose time counts only once it was waited for."""
    server: Any = multiprocessing.forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_alive_fd is None:
        return
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd, pid, server._forkserver_pid = None, server._forkserver_pid, None
    give_up = time.monotonic() + PATIENCE_S
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > give_up:  # a process that outlived its test holds it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(0.02)


@pytest.hookimpl(trylast=True)  # when pytest-xdist has waited for its processes
def pytest_sessionfinish(session: pytest.Session) -> None:
    end_fork_server()
    is_first = "PYTEST_XDIST_WORKER" not in os.environ
    if is_first and is_full(session.config) and used_s() > limit_s() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The CPU time of all processes of the tests, which other jobs of the machine change less than the wall time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    terminalreporter.write_line(f"CPU time: {used_s():,.0f} s")
    if is_full(terminalreporter.config) and used_s() > limit_s():
        told = f"more than the {limit_s():,.0f} s of {LIMITS.name}; make tests smaller, never the limit larger"
        terminalreporter.write_line(f"FAILED {NAME}: {used_s():,.0f} s, {told}", red=True)
