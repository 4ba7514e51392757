"""Bits per byte of general-purpose compressors: what text costs without a language model.

Two readings, both reported. `per_document`: each document alone, as the model sees it, container included: short
documents drown in headers. `concatenated`: all documents of a kind in one stream, so that each can refer to all
before it: more context than the model gets, and the stronger baseline.
"""

import lzma
import zlib
from collections.abc import Callable, Mapping, Sequence

Compressor = Callable[[bytes], int]
"""Size in bytes after compression."""


def gzip_size(data: bytes) -> int:
    """`gzip -9`: DEFLATE at level 9 with gzip's 18 bytes of header and checksum (RFC 1952)."""
    stream = zlib.compressobj(9, zlib.DEFLATED, 31, 9)
    return len(stream.compress(data)) + len(stream.flush())


def xz_size(data: bytes) -> int:
    """`xz -9e`. The dictionary is cut to the data's size: the same output for far less memory and time."""
    dictionary = min(1 << 26, max(1 << 12, 1 << (len(data) - 1).bit_length())) if data else 1 << 12
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": dictionary}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))


COMPRESSORS: Mapping[str, Compressor] = {"gzip": gzip_size, "xz": xz_size}


def compressed_bits(texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Bits per byte of one kind's documents: `{"gzip" | "xz": {"per_document": ..., "concatenated": ...}}`.

    The concatenation joins the texts with single newlines; bits are divided by the texts' own bytes in both readings.
    """
    encoded = [text.encode("utf-8") for text in texts]
    total = sum(map(len, encoded))
    joined = b"\n".join(encoded)
    return {
        name: {
            "per_document": 8 * sum(map(size, encoded)) / total,
            "concatenated": 8 * size(joined) / total,
        }
        for name, size in COMPRESSORS.items()
    }
