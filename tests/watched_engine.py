"""An engine of cleaning that remembers which functions it ran, and in which processes."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from modelwright.data.workers import ShardEngine


class WatchedEngine:
    def __init__(self, engine: ShardEngine) -> None:
        self.engine = engine
        self.processes: dict[str, list[int]] = {}
        """By the name of a function: the process that ran each item."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        processes = self.processes.setdefault(function.__name__, [])
        for process, result in self.engine.map(partial(_with_process, function), items):
            processes.append(process)
            yield result


def _with_process(function: Callable[[Any], Any], item: Any) -> tuple[int, Any]:
    return os.getpid(), function(item)
