"""Messages between the gateway and an engine process: JSON objects, one per line, over a Unix socket."""

import json
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

RECEIVE_BYTES = 1 << 20


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineDecoder:
    """Puts messages together from the parts in which they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete with `data`."""
        self._rest += data
        if b"\n" not in data:
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return [json.loads(line) for line in lines]


class BlockingChannel:
    """One end of the connection, for a process or thread that waits."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = LineDecoder()
        self._poll = select.poll()  # select.select takes no descriptor above 1023
        self._poll.register(connection, select.POLLIN)

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises `OSError` if the other side is gone."""
        self.connection.sendall(encode(message))

    def receive_one(self, timeout_s: float) -> dict[str, Any]:
        """The next message, where no other follows it. Raises `TimeoutError` if it does not arrive in time, and like
        `receive`.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for message in self.receive(left_s):
                return message
        raise TimeoutError

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Messages that are here, or arrive within a time; none if none does. Raises `EOFError` when the other side is
        gone.
        """
        if not self._poll.poll(1000 * timeout_s):
            return []
        data = self.connection.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        return self._decoder.feed(data)
