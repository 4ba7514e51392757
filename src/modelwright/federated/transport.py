"""Authenticated, encrypted messages over TCP.

Server and client have a secret key of 32 bytes in common, one for each client. The handshake mixes it with fresh X25519
keys of both sides, and each side proves that it knows it; from the result come two keys, one for each direction. Each
frame is sealed with ChaCha20-Poly1305 under a counter, so that none can be read, changed, repeated or left out.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.errors import ConfigError, DataError, ModelwrightError
from modelwright.federated.libraries import derive_key, sealing_cipher, x25519

KEY_BYTES = 32
HELLO_BYTES = 4096
"""Largest frame before the other side has proved who it is."""
HANDSHAKE_TIMEOUT_S = 20.0
_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True)
class PeerMessage:
    """A JSON header with `kind`, and bytes."""

    header: Mapping[str, Any]
    body: bytes = b""

    @property
    def kind(self) -> str:
        return str(self.header.get("kind", ""))


class ConnectionLostError(ModelwrightError):
    """The other side is gone, or did not keep to the protocol."""


@dataclass
class PeerConnection:
    """One side of a connection after the handshake. `send` may be called by several threads, `receive` by one."""

    sock: socket.socket
    send_key: bytes
    receive_key: bytes
    most_bytes: int
    """Largest frame that is accepted."""
    _sent: int = 0
    _received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: PeerMessage) -> None:
        """Raises `ConnectionLostError` if the other side does not take it."""
        header = json.dumps(message.header).encode()
        plain = _LENGTH.pack(len(header)) + header + message.body
        with self._lock:
            sealed = sealing_cipher(self.send_key).encrypt(_nonce(self._sent), plain, None)
            self._sent += 1
            _send_frame(self.sock, sealed)

    def receive(self) -> PeerMessage:
        """Wait for a message. Raises `ConnectionLostError` at the end of the connection and for a frame that is too
        large or not authentic.
        """
        sealed = _receive_frame(self.sock, self.most_bytes)
        try:
            plain = sealing_cipher(self.receive_key).decrypt(_nonce(self._received), sealed, None)
            self._received += 1
            (length,) = _LENGTH.unpack_from(plain)
            end = _LENGTH.size + length
            header = json.loads(plain[_LENGTH.size : end])
        except Exception as error:  # InvalidTag is no ValueError
            raise ConnectionLostError(f"a message was not authentic or not readable ({type(error).__name__})") from None
        if not isinstance(header, dict):
            raise ConnectionLostError("a message has no header")
        return PeerMessage(header, plain[end:])

    def close(self) -> None:
        with suppress(OSError):  # the other side may be gone
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def accept_client(
    sock: socket.socket, key_of: Callable[[str], bytes | None], *, most_bytes: int
) -> tuple[str, PeerConnection]:
    """The server's side of the handshake: the client's name and its connection.

    key_of: a client's key, None for one that is not known. Raises `ConnectionLostError` for a client that does not
    prove that it has its key.
    """
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    hello = _read_json(sock)
    name, client_public = str(hello.get("name", "")), str(hello.get("public", ""))
    key = key_of(name) or secrets.token_bytes(KEY_BYTES)  # an unknown name fails like a wrong key
    private = x25519().X25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw().hex()
    transcript = _transcript(name, client_public, public)
    _write_json(sock, {"public": public, "proof": _proof(key, "server", transcript)})
    if not hmac.compare_digest(_proof(key, "client", transcript), str(_read_json(sock).get("proof", ""))):
        raise ConnectionLostError(f"a client that calls itself {name!r} did not prove it")
    sock.settimeout(None)
    to_client, to_server = _direction_keys(private, client_public, key, transcript)
    return name, PeerConnection(sock, send_key=to_client, receive_key=to_server, most_bytes=most_bytes)


def connect_server(host: str, port: int, *, name: str, key: bytes, most_bytes: int, timeout_s: float) -> PeerConnection:
    """The client's side of the handshake. Raises `ConnectionLostError` without a server, or for one without the key."""
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ConnectionLostError(f"no server answers at {host}:{port} ({error})") from None
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        private = x25519().X25519PrivateKey.generate()
        public = private.public_key().public_bytes_raw().hex()
        _write_json(sock, {"name": name, "public": public})
        answer = _read_json(sock)
        server_public = str(answer.get("public", ""))
        transcript = _transcript(name, public, server_public)
        if not hmac.compare_digest(_proof(key, "server", transcript), str(answer.get("proof", ""))):
            raise ConnectionLostError(f"the server at {host}:{port} does not have the key of {name!r}")
        _write_json(sock, {"proof": _proof(key, "client", transcript)})
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        to_client, to_server = _direction_keys(private, server_public, key, transcript)
        return PeerConnection(sock, send_key=to_server, receive_key=to_client, most_bytes=most_bytes)
    except BaseException:
        sock.close()
        raise


def read_keys(path: Path) -> dict[str, bytes]:
    """The keys of a file with lines of a name and 64 hexadecimal digits. Raises `DataError` that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: other users may read these secret keys; run chmod 600 {path}")
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, key = words[0], bytes.fromhex(words[1])
        except (IndexError, ValueError):
            name, key = "", b""
        if len(key) != KEY_BYTES or len(words) != 2 or name in keys:
            raise DataError(f"{path}:{number}: must be a new name and 64 hexadecimal digits")
        keys[name] = key
    return keys


def new_key() -> str:
    """64 hexadecimal digits for a key file."""
    return secrets.token_hex(KEY_BYTES)


def _transcript(name: str, client_public: str, server_public: str) -> bytes:
    return json.dumps(["modelwright federated 1", name, client_public, server_public]).encode()


def _proof(key: bytes, side: str, transcript: bytes) -> str:
    return hmac.new(key, side.encode() + transcript, hashlib.sha256).hexdigest()


def _direction_keys(private: Any, other_public: str, key: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """The keys from server to client and from client to server."""
    try:
        public = x25519().X25519PublicKey.from_public_bytes(bytes.fromhex(other_public))
        secret = private.exchange(public) + key
    except ValueError:
        raise ConnectionLostError("the other side sent no X25519 key") from None
    salt = hashlib.sha256(transcript).digest()
    return (
        derive_key(secret, salt=salt, purpose="server to client"),
        derive_key(secret, salt=salt, purpose="client to server"),
    )


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "big")


def _write_json(sock: socket.socket, value: Mapping[str, Any]) -> None:
    _send_frame(sock, json.dumps(value).encode())


def _read_json(sock: socket.socket) -> dict[str, Any]:
    try:
        value = json.loads(_receive_frame(sock, HELLO_BYTES))
    except ValueError:
        raise ConnectionLostError("the other side does not speak this protocol") from None
    if not isinstance(value, dict):
        raise ConnectionLostError("the other side does not speak this protocol")
    return value


def _send_frame(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(_LENGTH.pack(len(data)))
        sock.sendall(data)
    except OSError as error:
        raise ConnectionLostError(f"the other side takes no messages ({error})") from None


def _receive_frame(sock: socket.socket, most_bytes: int) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    if length > most_bytes:
        raise ConnectionLostError(f"a message of {length:,} bytes; at most {most_bytes:,} are accepted")
    return _receive_exactly(sock, length)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    view, filled = memoryview(buffer), 0
    while filled < num_bytes:
        try:
            received = sock.recv_into(view[filled:])
        except OSError as error:
            raise ConnectionLostError(f"the connection broke ({error})") from None
        if not received:
            raise ConnectionLostError("the other side has closed the connection")
        filled += received
    return bytes(buffer)
