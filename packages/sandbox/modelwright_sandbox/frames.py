"""Messages between a training process and its launchers: a length, then that many bytes of JSON."""

import json
import struct
from typing import Any, BinaryIO

_HEADER = struct.Struct("<Q")


def write_frame(file: BinaryIO, message: dict[str, Any]) -> None:
    """Sends a message. Raises `OSError` if the other side is gone."""
    data = json.dumps(message).encode()
    file.write(_HEADER.pack(len(data)) + data)
    file.flush()


def read_frame(file: BinaryIO) -> dict[str, Any] | None:
    """Returns the next message; None at the end of the file, even in the middle of a message."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    data = file.read(size)
    return json.loads(data) if len(data) == size else None
