"""Messages between a training process and its launchers: a length and that many bytes of JSON."""

import json
import struct
from typing import Any, BinaryIO

_HEADER = struct.Struct("<Q")


def write_frame(file: BinaryIO, message: dict[str, Any]) -> None:
    """Raises `OSError` if the other side is gone."""
    data = json.dumps(message).encode()
    file.write(_HEADER.pack(len(data)) + data)
    file.flush()


def read_frame(file: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the file, also in the middle of a message."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    data = file.read(size)
    return json.loads(data) if len(data) == size else None
