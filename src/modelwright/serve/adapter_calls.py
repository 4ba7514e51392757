"""The gateway's side of loading and unloading adapters in engine processes; see `adapter_loading`."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from modelwright.serve.engine_handle import EngineLink


@dataclass(frozen=True)
class AdapterReply:
    """text: the digest of the adapter's values, or why it cannot be used."""

    is_done: bool
    text: str


class AdapterCalls:
    """Waits for the replies of engines. A reply of an engine that is lost never comes."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, asyncio.Future[AdapterReply | None]]] = {}

    async def ask(self, links: Mapping[str, EngineLink], name: str, folder: str) -> dict[str, AdapterReply]:
        """Ask engines, by their names, what `AdapterLoader.begin` does; returns the replies of those that are not lost
        meanwhile.
        """
        loop, futures = asyncio.get_running_loop(), dict[str, asyncio.Future[AdapterReply | None]]()
        for engine_name, link in links.items():
            number = next(self._numbers)
            futures[engine_name] = loop.create_future()
            self._waiting[number] = (engine_name, futures[engine_name])
            link.send({"adapters": [[number, name, folder]]})
        replies = dict(zip(futures, await asyncio.gather(*futures.values()), strict=True))
        return {engine_name: reply for engine_name, reply in replies.items() if reply is not None}

    def take(self, number: int, reply: AdapterReply) -> None:
        """Pass on a reply."""
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(reply)

    def lose(self, engine_name: str) -> None:
        """Wait no longer for an engine."""
        for number in [number for number, (name, _) in self._waiting.items() if name == engine_name]:
            _, future = self._waiting.pop(number)
            if not future.done():
                future.set_result(None)
