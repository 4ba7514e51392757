"""Shards as tasks of Ray: the same functions as in processes of one machine, on one machine or on a cluster.

Tasks of Ray itself rather than operators of Ray Data: shards are read while others are measured, and what a task
returns are a few counters, because its documents stay in the working folder.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from modelwright.core.errors import ConfigError, ModelwrightError

_CONNECT_SECONDS = 5.0
_QUEUED_PER_CORE = 2
_MOST_TRIES = 3


class RayTasks:
    """Work in the tasks of Ray.

    Connects to the cluster at `RAY_ADDRESS`, otherwise starts Ray on this machine with `num_workers` cores. All nodes
    must see the current folder and the working folder under the same paths, as on a shared file system. A task whose
    worker is killed is run again by Ray. Raises `ConfigError` if Ray is not installed or the cluster cannot be reached.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        ray = _connected(self.num_workers)
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


def _connected(num_workers: int) -> Any:
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
        _check_reachable(address)
        local = {} if address else {"num_cpus": num_workers, "include_dashboard": False}
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
        except Exception as error:  # which Ray raises itself where the machine is too busy to start it in time
            text = f"RAY_ADDRESS: no Ray cluster at {address}" if address else "Ray could not start on this machine"
            raise ConfigError(f"{text} ({error}); clean.engine local needs none") from None
    return ray


def _check_reachable(address: str | None) -> None:
    """Ray itself tries for minutes before it says that nobody answers."""
    host, separator, port = (address or "").removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        return  # "auto", "local" or nothing
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        text = f"RAY_ADDRESS: no Ray cluster at {address} ({error})"
        raise ConfigError(f"{text}; start one with `ray start --head`, or unset RAY_ADDRESS") from None
