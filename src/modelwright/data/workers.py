"""Runs one function on many items: in this process, in several, or as tasks of Ray on one machine or a cluster.

Local processes survive the loss of one. Ray runs plain tasks instead of operators of Ray Data: shards are read while
others are measured, and a task returns only a few counters, because its documents stay in the working folder.
"""

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing.connection import wait as wait_for
from typing import Any, Protocol

from modelwright.core.config import ConfigError, ModelwrightError

_MOST_BREAKS = 3
# Two a worker: the next item is there when one is done, and few items wait in memory.
_QUEUED_PER_WORKER = 2
_CONNECT_SECONDS = 5.0
_QUEUED_PER_CORE = 2
_MOST_TRIES = 3


class ShardEngine(Protocol):
    """Runs the work on shards."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Yields `function` of each item as results become available, in any order. Functions and items are pickled;
        items are taken from an iterator as they are needed.
        """
        ...


def in_order(engine: ShardEngine, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yields `function` of each item, in the order of the items; results that come early wait."""
    waiting: dict[int, Any] = {}
    following = 0
    for number, result in engine.map(partial(_numbered, function), enumerate(items)):
        waiting[number] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def _numbered(function: Callable[[Any], Any], item: tuple[int, Any]) -> tuple[int, Any]:
    return item[0], function(item[1])


class InProcess:
    """Runs all work in this process."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)


@dataclass(frozen=True)
class LocalProcesses:
    """Runs work in `num_workers` processes of this machine, or in this one for little work.

    start_after_s: processor time of the work after which processes start; a corpus that needs less never starts any,
    and a larger one loses at most that.

    An item whose process is killed is tried again in a new one. Raises `ModelwrightError` if that happens repeatedly,
    as when the machine has too little memory. The processes stay for the next work: to start and import takes each of
    them seconds, which for a small corpus is more than two save.
    """

    num_workers: int
    start_after_s: float = 2.0
    _idle: list[ProcessPoolExecutor] = field(default_factory=list[ProcessPoolExecutor], repr=False, compare=False)

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        left, spent_s = iter(items), 0.0
        is_alone = self.num_workers == 1 or multiprocessing.current_process().daemon  # which may have no children
        if is_alone or (self.start_after_s and not self._idle):
            for item in left:
                started = time.process_time()
                result = function(item)
                spent_s += time.process_time() - started
                yield result
                if spent_s >= self.start_after_s and not is_alone:
                    break
            else:
                return
        numbered, unfinished, num_breaks = enumerate(left), dict[int, Any](), 0
        while True:
            try:
                yield from self._attempt(function, numbered, unfinished)
                return
            except BrokenProcessPool:
                num_breaks += 1
                if num_breaks == _MOST_BREAKS:
                    text = f"worker processes were killed {num_breaks} times, perhaps for lack of memory"
                    raise ModelwrightError(f"{text}; use fewer workers and run the same command again") from None

    def _attempt(
        self, function: Callable[[Any], Any], left: Iterator[tuple[int, Any]], unfinished: dict[int, Any]
    ) -> Iterator[Any]:
        """Yields results of unfinished and left items. unfinished: by number, kept up to date for another try."""
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of PyTorch hold
        new = partial(ProcessPoolExecutor, self.num_workers, context, initializer=follow_parent)
        pool, is_whole = self._idle.pop() if self._idle else new(), False
        try:
            running = {pool.submit(function, item): number for number, item in unfinished.items()}
            while True:
                for number, item in islice(left, max(0, _QUEUED_PER_WORKER * self.num_workers - len(running))):
                    unfinished[number] = item
                    running[pool.submit(function, item)] = number
                if not running:
                    is_whole = True
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number, result = running.pop(future), future.result()
                    del unfinished[number]
                    yield result
        finally:
            if is_whole:
                self._idle.append(pool)
            else:
                pool.shutdown(wait=False, cancel_futures=True)


def follow_parent() -> None:
    """Leaves Ctrl-C to the parent, and exits with it, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class RayTasks:
    """Runs work in the tasks of Ray.

    Connects to the cluster at `RAY_ADDRESS`, otherwise starts Ray on this machine with `num_workers` cores. All nodes
    must see the current folder and the working folder under the same paths, as on a shared file system. A task whose
    worker is killed is run again by Ray. Raises `ConfigError` if Ray is not installed or the cluster cannot be reached.
    """

    num_workers: int

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        # Set before Ray starts: no usage reports, and tasks that ask for no GPU still see the accelerators.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
            import ray.exceptions
        except ImportError as error:
            text = f"clean.engine: ray needs a package that is not installed ({error.name})"
            raise ConfigError(f"{text}; pip install 'modelwright[ray]', or use engine local") from None
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS")
            # Ray itself tries for minutes to reach a cluster that does not answer; "auto" and "local" have no port.
            host, separator, port = (address or "").removeprefix("ray://").rpartition(":")
            if separator and port.isdecimal():
                try:
                    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
                except (OSError, OverflowError) as error:
                    text = f"RAY_ADDRESS: no Ray cluster at {address} ({error})"
                    raise ConfigError(f"{text}; start one with `ray start --head`, or unset RAY_ADDRESS") from None
            local = {} if address else {"num_cpus": self.num_workers, "include_dashboard": False}
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
            except Exception as error:  # which Ray raises itself where the machine is too busy to start it in time
                text = f"RAY_ADDRESS: no Ray cluster at {address}" if address else "Ray could not start on this machine"
                raise ConfigError(f"{text} ({error}); clean.engine local needs none") from None
        task = ray.remote(max_retries=_MOST_TRIES - 1)(_in_folder)
        most = _QUEUED_PER_CORE * int(ray.cluster_resources().get("CPU", self.num_workers))
        left, running = iter(items), list[Any]()
        while True:
            running += [task.remote(os.getcwd(), function, item) for item in islice(left, most - len(running))]
            if not running:
                return
            (done,), running = ray.wait(running, num_returns=1)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None  # Ray's own error would show the user where it was raised
            except ray.exceptions.RayError as error:
                text = f"Ray could not finish the work on shards: {error}"
                raise ModelwrightError(f"{text}; run the same command again, which goes on where this ended") from None
            yield result


def _in_folder(folder: str, function: Callable[[Any], Any], item: Any) -> Any:
    os.chdir(folder)  # relative paths mean what they mean to the user
    return function(item)
