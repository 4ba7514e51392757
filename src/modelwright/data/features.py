"""Features of a text: what the step quality judges, for every document.

Repetition and symbols are measured as in Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, table A1). A *data
line* is made of literals: after numbers, quoted strings, escapes and a trailing comment are removed, letters make up
less than a quarter of it. Code pages (`encodings.cp1252`), character tables and dumps consist of data lines; a model
would spend its capacity on copying them.
"""

import math
import re
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modelwright.data.document import Document
from modelwright.data.steps import text_signs
from modelwright.data.words import hash_words, split_words

_LITERAL = re.compile(
    r"""[rbuRBU]{0,2}"(?:[^"\\]|\\.)*"|[rbuRBU]{0,2}'(?:[^'\\]|\\.)*'|\b0[xX][0-9a-fA-F]+\b|[-+]?\b\d[\w.]*"""
)
_MAY_BE_DATA = re.compile(r"""['"\d]""")
_COMMENT = re.compile(r"\s*(#|//).*$")
_DIGIT = re.compile(r"\d")
_SYMBOL = re.compile(r"[^\w\s.,;:!?'\"()\-\u2010-\u201f\u3001-\u3003\uff0c\uff1a\uff1b\uff01\uff1f]")
_CUT_OFF = re.compile(r"\w\s*(?:\.\.\.|\u2026|\.{0,3}\s*\[?(?:read|show) more\W*)$", re.IGNORECASE)
_LATIN = re.compile(r"[A-Za-zÀ-ɏ]")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")
_ASCII = [chr(code) for code in range(128)]
_ASCII_DIGITS = [code for code, char in enumerate(_ASCII) if _DIGIT.match(char)]
_ASCII_SYMBOLS = [code for code, char in enumerate(_ASCII) if _SYMBOL.match(char)]
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MAX_NGRAM = 4
_COMPRESSED_CHARS = 20_000
MIN_LINES = 8
"""Repeated lines and lines of data are not judged in shorter documents."""
_FEWEST_LINES_OF_CODE = 4
_HEAD_CHARS = 200_000
"""Features of longer texts are those of their first characters."""

FEATURES = (
    "num_chars", "num_words", "mean_word_chars", "char_entropy", "word_entropy", "digit_fraction", "symbol_fraction",
    "duplicate_line_fraction", "data_fraction", "top_ngram_fraction", "compression_ratio", "stop_word_fraction",
    "ellipsis_fraction", "misordered_fraction", "sorted_fraction", "broken_word_fraction", "record_fraction",
    "error_fraction", "cut_end_fraction", "code_fraction",
)  # fmt: skip
"""num_chars: of the text without its title, for pairs of the answers; num_words: of the whole text. Entropies in bits.
duplicate_line_fraction, data_fraction: of characters, in lines that occurred before and in lines of data, 0 below
`MIN_LINES` lines. top_ngram_fraction: largest fraction of characters that one 2- to 4-gram of words covers.
compression_ratio: compressed over uncompressed bytes (zlib). stop_word_fraction: of the words in Latin script, those
that are frequent in one language, 1 where there are few words in Latin script. ellipsis_fraction: of the lines, those
that end where the text was cut off (an ellipsis, "Read more"). The others: see `text_signs.py`."""


def measure(document: Document) -> list[float]:
    """The features of a document, in the order of `FEATURES`."""
    whole, body = document.text, document.body
    text = whole[:_HEAD_CHARS]
    lines = [line for line in text.split("\n") if line.strip()]
    has_lines = len(lines) >= MIN_LINES
    words = split_words(text)
    num_chars, num_words = max(1, len(text)), len(words)
    if len(text) < len(whole):
        num_words = num_words * len(whole) // num_chars
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    counts, num_digits, num_symbols = _characters(text)
    hashes = hash_words(words)
    function_words, language = text_signs.function_word_share(words)
    raw = text[:_COMPRESSED_CHARS].encode("utf-8", "replace")
    return [
        float(len(body) if body.strip() else 0),
        float(num_words),
        float(lengths.mean()) if len(words) else 0.0,
        _entropy(counts),
        _entropy(np.unique(hashes, return_counts=True)[1]),
        num_digits / num_chars,
        num_symbols / num_chars,
        duplicate_share(lines) if has_lines else 0.0,
        data_share(lines) if has_lines else 0.0,
        _top_ngram_share(hashes, lengths, num_chars),
        len(zlib.compress(raw, 1)) / max(1, len(raw)),
        function_words if words and _is_latin(text) else 1.0,
        sum(map(_is_cut_off, lines)) / max(1, len(lines)),
        text_signs.misordered_share(words, language),
        text_signs.sorted_share(words),
        text_signs.broken_word_share(text, len(words)),
        text_signs.record_share(lines) if has_lines else 0.0,
        text_signs.error_share(lines),
        text_signs.cut_end_share(body),
        text_signs.code_share(lines) if len(lines) >= _FEWEST_LINES_OF_CODE else 0.0,
    ]


def duplicate_share(lines: Sequence[str]) -> float:
    """Share of the characters that are in lines that occurred before."""
    seen: set[str] = set()
    duplicate = total = 0
    for line in lines:
        total += len(line)
        if line in seen:
            duplicate += len(line)
        seen.add(line)
    return duplicate / max(1, total)


def data_share(lines: Sequence[str]) -> float:
    """Share of the characters that are in data lines."""
    data = sum(len(line) for line in lines if is_data_line(line))
    return data / max(1, sum(map(len, lines)))


def is_data_line(line: str) -> bool:
    """Whether a line holds literals and hardly anything else. A comment alone is not data."""
    if not _MAY_BE_DATA.search(line):
        return False
    code = _COMMENT.sub("", line) if "#" in line or "//" in line else line
    rest, num_literals = _LITERAL.subn("", code)
    letters = sum(map(str.isalpha, rest))
    return num_literals > 0 and letters < 0.25 * len(code.strip())


def _is_cut_off(line: str) -> bool:
    may_be = "..." in line or "\u2026" in line or "more" in line.lower()
    return may_be and _CUT_OFF.search(line) is not None


def _characters(text: str) -> tuple[NDArray[np.int64], int, int]:
    """Counts of the different characters, and how many characters are digits and symbols."""
    if text.isascii():
        counts = np.bincount(np.frombuffer(text.encode("ascii"), np.uint8), minlength=128)
        return counts[counts > 0], int(counts[_ASCII_DIGITS].sum()), int(counts[_ASCII_SYMBOLS].sum())
    points = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
    counts = np.unique(points, return_counts=True)[1]
    return counts, len(_DIGIT.findall(text)), len(_SYMBOL.findall(text))


def _entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in bits per symbol."""
    total = int(counts.sum())
    return float(math.log2(total) - (counts * np.log2(counts)).sum() / total) if total else 0.0


def _top_ngram_share(hashes: NDArray[np.uint64], lengths: NDArray[np.int64], num_chars: int) -> float:
    largest, rolled, covered = 0.0, hashes, lengths
    for n in range(2, _MAX_NGRAM + 1):
        if len(hashes) < n:
            break
        rolled = rolled[:-1] * _MULTIPLIER + hashes[n - 1 :]
        covered = covered[:-1] + lengths[n - 1 :] + 1
        order = rolled.argsort(kind="stable")
        ordered = rolled[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(starts, append=len(ordered))
        repeated = counts > 1
        if not repeated.any():
            break  # a longer phrase repeats only where a shorter one does
        most = (counts[repeated] * covered[order[starts[repeated]]]).max()
        largest = max(largest, float(most) / num_chars)
    return largest


def _is_latin(text: str) -> bool:
    """Whether most of a text is in Latin script. In Chinese and Japanese a few characters say as much as a line of the
    commands between them.
    """
    head = text[:1000]
    return len(_LATIN.findall(head)) >= 0.5 * len(head) and len(_UNSPACED.findall(head)) <= 0.05 * len(head)
