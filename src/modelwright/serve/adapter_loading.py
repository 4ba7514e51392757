"""How an engine process loads and unloads adapters when the gateway says so (`adapter_calls`). A file is read in a
thread, so that the engine goes on meanwhile.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from modelwright.core.errors import ModelwrightError
from modelwright.infer.engine import Engine
from modelwright.model.adapter_bank import PreparedAdapter, prepare_adapter

log = logging.getLogger("modelwright.serve")


class AdapterLoader:
    """Carries out what the gateway asks for, between two steps of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(1)
        self._reading: dict[int, tuple[str, Future[PreparedAdapter]]] = {}
        self._replies: list[list[Any]] = []

    def begin(self, number: int, name: str, folder: str) -> None:
        """Load the adapter in a folder, or without a folder let no later job name it."""
        if folder:
            future = self._threads.submit(prepare_adapter, self._engine.model, Path(folder))
            self._reading[number] = (name, future)
            return
        if name in self._engine.adapters.names:
            self._engine.remove_adapter(name)
        self._replies.append([number, True, ""])

    def replies(self) -> list[list[Any]]:
        """Number of the call and fields of an `AdapterReply`, for all calls that are finished since the last time."""
        for number, (name, future) in list(self._reading.items()):
            if future.done():
                del self._reading[number]
                self._replies.append([number, *self._installed(name, future)])
        replies, self._replies = self._replies, []
        return replies

    def _installed(self, name: str, future: "Future[PreparedAdapter]") -> tuple[bool, str]:
        try:
            adapter = future.result()
            self._engine.add_adapter(name, adapter)
        except ModelwrightError as error:
            return False, str(error)
        except Exception as error:  # a file that nobody has thought of must not end the engine and all its answers
            log.exception("the adapter %s could not be loaded", name)
            return False, f"{type(error).__name__}: {error}"
        return True, adapter.digest
