"""A file of numbers that is read in parts and never mapped, so that what was read once does not stay in memory."""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_READ_AT_MOST = 2**30


class DiskFile:
    """Reads parts of a file. `num_read` counts the bytes that were read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY)
        self.num_read = 0
        weakref.finalize(self, os.close, self._handle)

    def read(self, dtype: Any, start: int, stop: int, *, offset: int = 0) -> NDArray[Any]:
        """The values from number `start` to below `stop`, counted from byte `offset`. Raises `EOFError` if the file
        ends before.
        """
        dtype = np.dtype(dtype)
        return np.frombuffer(self.read_bytes(offset + start * dtype.itemsize, (stop - start) * dtype.itemsize), dtype)

    def read_bytes(self, start: int, count: int) -> bytes:
        parts: list[bytes] = []
        left = count
        while left:
            part = os.pread(self._handle, min(left, _READ_AT_MOST), start + count - left)
            if not part:
                raise EOFError(f"{self._path} ends at byte {start + count - left}, {left} bytes too early")
            parts.append(part)
            left -= len(part)
        self.num_read += count
        return parts[0] if len(parts) == 1 else b"".join(parts)
