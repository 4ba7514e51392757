"""Words of a text and their hashes, the same in every process."""

import re
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\u0e00-\u0eff"
_ANY_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
# Bounds the memory of each worker; a cleared cache fills again within a few documents.
_MAX_CACHED = 500_000
_cache: dict[str, int] = {}


def split_words(text: str) -> list[str]:
    """Words in lower case. Characters of scripts without spaces (Chinese, Japanese, Thai) count as words."""
    pattern = _ASCII_WORD if text.isascii() else _ANY_WORD
    return pattern.findall(text.lower())


def hash_words(words: Sequence[str]) -> NDArray[np.uint64]:
    """A 64-bit hash of each word [N]."""
    if len(_cache) > _MAX_CACHED:
        _cache.clear()
    try:  # most texts have no word that none before them had
        return np.fromiter(map(_cache.__getitem__, words), np.uint64, len(words))
    except KeyError:
        return np.array([_cache.get(word) or _remember(word) for word in words], np.uint64)


def _remember(word: str) -> int:
    # The finalizer of SplitMix64 (Steele et al. 2014) over length and CRC-32 of the word; never 0. Python's own `hash`
    # differs from process to process.
    value = zlib.crc32(word.encode("utf-8", "replace")) + (len(word) << 32)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return _cache.setdefault(word, value ^ (value >> 31) or 1)
