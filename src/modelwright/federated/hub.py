"""The server's connections: clients come and go, and a phase of a round ends when all have answered or time is up."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from modelwright.core.errors import ModelwrightError
from modelwright.federated.transport import ConnectionLostError, PeerConnection, PeerMessage, accept_client

SEND_PATIENCE_S = 20.0
"""How long a client that takes no bytes may hold up the sender."""


class Hub:
    """Accepts clients at `port` (0: any) until it is closed. One thread receives for each client."""

    def __init__(self, keys: Mapping[str, bytes], *, host: str, port: int, most_bytes: int) -> None:
        self._keys, self._most_bytes = keys, most_bytes
        self._listener = socket.create_server((host, port))
        self._connections: dict[str, PeerConnection] = {}
        self._lock = threading.Lock()
        self._arrived: queue.Queue[tuple[str, PeerMessage]] = queue.Queue()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    @property
    def names(self) -> list[str]:
        """The clients that are connected now."""
        with self._lock:
            return sorted(self._connections)

    def wait_for(self, num_clients: int, *, timeout_s: float) -> None:
        """Wait until so many clients are connected. Raises `ModelwrightError` when time is up."""
        end = time.monotonic() + timeout_s
        while len(self.names) < num_clients:
            if time.monotonic() >= end:
                raise ModelwrightError(
                    f"federated: {len(self.names)} clients after {timeout_s:.0f} s, {num_clients} are needed"
                )
            time.sleep(0.02)

    def ask(
        self, messages: Mapping[str, PeerMessage], *, kind: str, round_number: int, timeout_s: float
    ) -> dict[str, PeerMessage]:
        """Send each client its message, and return the answers of the wanted kind that come in time.

        A client that is not connected, breaks off, or sends something else is left out. Answers to earlier rounds are
        passed over.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            asked = {name: self._connections.get(name) for name in messages}
        for name, message in messages.items():
            threading.Thread(target=self._send, args=(name, message), daemon=True).start()
        waiting, answers = set(messages), dict[str, PeerMessage]()
        while waiting and (left := end - time.monotonic()) > 0:
            try:
                name, message = self._arrived.get(timeout=min(left, 0.1))
            except queue.Empty:
                with self._lock:  # one that has come back since has not heard the question
                    waiting = {name for name in waiting if asked[name] and self._connections.get(name) is asked[name]}
                continue
            is_answer = message.kind == kind and message.header.get("round") == round_number
            if name in waiting and is_answer:
                answers[name] = message
            if name in waiting and (is_answer or message.kind == "failed"):
                waiting.discard(name)
        return answers

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for name in self.names:
            self._drop(name)
        self._accepting.join(timeout=5)

    def _send(self, name: str, message: PeerMessage) -> None:
        with self._lock:
            connection = self._connections.get(name)
        if connection is not None:
            try:
                connection.send(message)
            except ConnectionLostError:
                self._drop(name, only=connection)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            name, connection = accept_client(sock, self._keys.get, most_bytes=self._most_bytes)
        except (ModelwrightError, OSError):
            sock.close()
            return
        # The kernel gives up on a client that takes no bytes; without it, one could hold up a sender for ever.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_PATIENCE_S))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            earlier = self._connections.get(name)
            self._connections[name] = connection
        if earlier is not None:
            earlier.close()  # the client has come back, its old connection is dead
        self._receive(name, connection)

    def _receive(self, name: str, connection: PeerConnection) -> None:
        try:
            while True:
                self._arrived.put((name, connection.receive()))
        except ConnectionLostError:
            self._drop(name, only=connection)

    def _drop(self, name: str, only: PeerConnection | None = None) -> None:
        """Forget a client's connection; only: not if it has another one by now."""
        with self._lock:
            connection = self._connections.get(name)
            if connection is None or (only is not None and connection is not only):
                return
            del self._connections[name]
        connection.close()


Note = Callable[[str], None]
"""Shows a line to the user."""
