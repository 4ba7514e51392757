"""What all tests share: a working folder of their own each, and processes that hear Ctrl-C, also where the tests run in
the background.
"""

import gc
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import modelwright  # noqa: F401  (sets what PyTorch reads when it is loaded, before a test imports it)
from forked_commands import fork_commands
from impatient import look_once

pytest_plugins = ("cpu_budget", "longest_first")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub, except those of a hub of their own
look_once()
fork_commands()

# The tests leave the folder that they are started in, and so do the processes that they start.
if os.environ.get("PYTHONPATH"):
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _fail_by_signal(number: int, frame: object) -> None:
    raise RuntimeError(f"{signal.Signals(number).name} reached the process of the tests")


if "PYTEST_XDIST_WORKER" in os.environ:  # which a signal would otherwise end without a word of where it came from
    signal.signal(signal.SIGTERM, _fail_by_signal)


@pytest.fixture(scope="session", autouse=True)
def no_working_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, in which fixtures of a wider scope than one test are made."""
    folder = tmp_path_factory.mktemp("working-folders")
    os.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_working_folder(no_working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in an empty folder. A name such as `quickstart` is looked for in `runs/` of the working folder,
    so a test would find the runs of the developer, and another test the runs of that one.
    """
    monkeypatch.chdir(tempfile.mkdtemp(dir=no_working_folder))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from whole_files import WholeFiles

    return WholeFiles(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    # A third of the fast tests' time is waiting for other processes and sockets, which one more worker fills. Slow ones
    # start servers, clusters and runs, and wait for half of theirs.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 * num_cores if config.option.markexpr == "slow" else num_cores + 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a process of the tests ended that was lost; pytest-xdist says only that it was."""
    if error:
        process = node.gateway._io.popen
        try:
            how = f"it ended with {process.wait(10)}"
        except subprocess.TimeoutExpired:
            how = "it still runs, but has closed its connection"
        node.config.get_terminal_writer().line(f"[{node.gateway.id}] process {process.pid} was lost: {how}")


def pytest_collection_finish() -> None:
    """Exempt everything that is imported by now from garbage collection.

    Every training run ends with a full collection, which otherwise visits about a million objects of modules.
    """
    gc.collect()
    gc.freeze()
