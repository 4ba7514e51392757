"""Quality: features of a text, and limits on them for each kind of document.

Repetition and symbols are measured as in Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, table A1). A *data
line* is made of literals: after numbers, quoted strings, escapes and a trailing comment are removed, letters make up
less than a quarter of it. Code pages (`encodings.cp1252`), character tables and dumps consist of data lines; a model
would spend its capacity on copying them.

Every feature is measured of every document and stored, so that `thresholds: auto` can derive limits from the corpus'
own quantiles, and `clean --explain` can show them.
"""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.data.document import KINDS, Document, Kind
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
_LANGUAGE_CHARS = 2_000
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
`min_lines` lines. top_ngram_fraction: largest fraction of characters that one 2- to 4-gram of words covers.
compression_ratio: compressed over uncompressed bytes (zlib). stop_word_fraction: of the words in Latin script, those
that are frequent in one language, 1 where there are few words in Latin script. ellipsis_fraction: of the lines, those
that end where the text was cut off (an ellipsis, "Read more"). The others: see `text_signs.py`."""

_REASONS = {
    "num_chars": ("too short", "too long"), "num_words": ("too few words", "too many words"),
    "mean_word_chars": ("short words", "long words"), "char_entropy": ("low entropy", "high entropy"),
    "word_entropy": ("low word entropy", "high word entropy"), "digit_fraction": ("few digits", "many digits"),
    "symbol_fraction": ("few symbols", "many symbols"),
    "duplicate_line_fraction": ("few repeated lines", "repeated lines"),
    "data_fraction": ("little data", "table of data"),
    "top_ngram_fraction": ("few repeated phrases", "repeated phrase"),
    "compression_ratio": ("repetitive", "incompressible"),
    "stop_word_fraction": ("no stop words", "many stop words"),
    "ellipsis_fraction": ("few ellipses", "cut off"),
    "misordered_fraction": ("few misordered words", "words out of order"),
    "sorted_fraction": ("words out of alphabetical order", "word list"),
    "broken_word_fraction": ("few broken words", "broken words"),
    "record_fraction": ("few records", "log or records"), "error_fraction": ("few error messages", "error page"),
    "cut_end_fraction": ("few cut ends", "fragment"), "code_fraction": ("little code", "much code"),
}  # fmt: skip

LIMIT_OF = {
    reason: f"{side}_{name}"
    for name, reasons in _REASONS.items()
    for side, reason in zip(("min", "max"), reasons, strict=True)
}
"""The limit that a document violates, by the reason for which it is dropped."""

Limits = Mapping[str, float]
"""By `min_FEATURE` or `max_FEATURE`."""

_ANY = {"min_num_chars": 20.0, "max_num_chars": 2_000_000.0, "max_data_fraction": 0.6}
DEFAULT_LIMITS: Mapping[Kind, Limits] = {
    "prose": _ANY | {
        "max_duplicate_line_fraction": 0.3, "max_top_ngram_fraction": 0.3, "max_digit_fraction": 0.5,
        "max_symbol_fraction": 0.3, "min_char_entropy": 2.0, "max_char_entropy": 8.0, "min_compression_ratio": 0.1,
        "max_mean_word_chars": 15.0, "min_stop_word_fraction": 0.07, "max_ellipsis_fraction": 0.3,
        "max_misordered_fraction": 0.1, "max_broken_word_fraction": 0.08, "max_record_fraction": 0.5,
        "max_sorted_fraction": 0.8, "max_error_fraction": 0.1,
    },
    "code": _ANY | {
        "max_duplicate_line_fraction": 0.6, "min_char_entropy": 2.0, "min_compression_ratio": 0.05,
        "max_mean_word_chars": 30.0,
    },
    "qa": {"min_num_chars": 1.0, "max_num_chars": 2_000_000.0, "max_duplicate_line_fraction": 0.3},
}  # fmt: skip
"""Gopher's limits where it has them, wider for short documents; see `QualityConfig.limits`."""
_CODE_LINES = 0.4
"""Prose of which more lines look like code is judged as code: records often have no kind."""
_OF_ANY_LENGTH = (
    "num_chars", "num_words", "duplicate_line_fraction", "data_fraction", "ellipsis_fraction", "misordered_fraction",
    "broken_word_fraction", "error_fraction", "cut_end_fraction",
)  # fmt: skip
_OF_SHORT_TEXTS = ("cut_end_fraction",)
"""Long texts are more than their ends. No limit by default: chats and comments are often written in lower case."""
_NEVER_AUTOMATIC = ("num_chars", "num_words", "cut_end_fraction", "code_fraction")

_SHORT_WORDS, _SHORT_CHARS = 50, 300
"""Fractions, ratios and entropies of shorter texts vary too much to be judged."""


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """Limits on features of a text, for each kind of document."""

    thresholds: Literal["fixed", "auto"] = "fixed"
    """`auto` tightens the limits by the corpus: to the 1% and 99% quantiles of each feature by kind, widened by half
    their distance from the median."""
    auto_tail: float = constant(0.01)
    """Tail of the distribution that `thresholds: auto` starts from."""
    limits: dict[str, float] = field(default_factory=dict)
    """Limits that replace the default or automatic ones, for all kinds (`max_digit_fraction: 0.4`) or one
    (`prose.max_digit_fraction: 0.4`); docs/data.md lists the features and defaults."""
    languages: tuple[str, ...] = ()
    """Keep only prose and pairs in these languages (ISO 639-1 codes, such as `en`); empty keeps all."""
    min_lines: int = constant(8)
    """Repeated lines and lines of data are not judged in shorter documents."""

    def __post_init__(self) -> None:
        if not 0 < self.auto_tail < 0.5:
            raise ConfigError(f"auto_tail: must be above 0 and below 0.5, got {self.auto_tail}; 0.01 is usual")
        for name in self.limits:
            kind, _, limit = name.rpartition(".")
            if kind not in ("", *DEFAULT_LIMITS) or limit[:4] not in ("min_", "max_") or limit[4:] not in FEATURES:
                raise ConfigError(f"limits: {name!r} is not [KIND.]min_FEATURE or max_FEATURE; features: {FEATURES}")
        if self.languages:
            _check_languages(self.languages)


def _check_languages(languages: Sequence[str]) -> None:
    import py3langid  # takes half a second

    known = sorted({code for code, _ in py3langid.rank("")})
    if unknown := [code for code in languages if code not in known]:
        text = f"languages: {unknown[0]!r} is not the code of a language that can be recognized, such as en, de or zh"
        raise ConfigError(f"{text}; known are {', '.join(known)}")


def measure(document: Document, config: QualityConfig) -> list[float]:
    """The features of a document, in the order of `FEATURES`."""
    whole, body = document.text, document.body
    text = whole[:_HEAD_CHARS]
    lines = [line for line in text.split("\n") if line.strip()]
    has_lines = len(lines) >= config.min_lines
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
        sum(_CUT_OFF.search(line) is not None for line in lines) / max(1, len(lines)),
        text_signs.misordered_share(words, language),
        text_signs.sorted_share(words),
        text_signs.broken_word_share(text, len(words)),
        text_signs.record_share(lines) if has_lines else 0.0,
        text_signs.error_share(lines),
        text_signs.cut_end_share(body),
        text_signs.code_share(lines) if len(lines) >= _FEWEST_LINES_OF_CODE else 0.0,
    ]


def has_language(document: Document, config: QualityConfig) -> bool:
    """Whether a document is in one of the wanted languages, as far as there are any and it is not code."""
    if not config.languages or document.kind == "code":
        return True
    import py3langid  # takes half a second

    return py3langid.classify(document.text[:_LANGUAGE_CHARS])[0] in config.languages


def judged_kinds(features: NDArray[np.float32], kinds: NDArray[np.int8]) -> NDArray[np.int8]:
    """The kinds [N] whose limits apply to documents [N]: prose whose lines look like code is judged as code."""
    is_code = (kinds == KINDS.index("prose")) & (features[:, FEATURES.index("code_fraction")] > _CODE_LINES)
    return np.where(is_code, np.int8(KINDS.index("code")), kinds)


def limits_by_kind(config: QualityConfig, features: Mapping[Kind, NDArray[np.float32]]) -> dict[Kind, dict[str, float]]:
    """The limits in effect. features: [documents, features] by kind; read for `thresholds: auto` only."""
    result: dict[Kind, dict[str, float]] = {}
    for kind, defaults in DEFAULT_LIMITS.items():
        limits = dict(defaults)
        if config.thresholds == "auto" and len(features.get(kind, ())):
            limits |= _tighter(limits, _quantile_limits(features[kind], config.auto_tail))
        limits |= {name: value for name, value in config.limits.items() if "." not in name}
        limits |= {name[len(kind) + 1 :]: v for name, v in config.limits.items() if name.startswith(f"{kind}.")}
        result[kind] = limits
    return result


def judge(features: NDArray[np.float32], limits: Limits) -> list[tuple[NDArray[np.bool_], str, str, float]]:
    """For each limit in order: which of the documents [N] violate it, the reason, the feature and the limit.

    Documents of fewer than 50 words and 300 characters are judged by their length, lines, ends and words alone.
    """
    num_words, num_chars = (features[:, FEATURES.index(name)] for name in ("num_words", "num_chars"))
    is_short = (num_words < _SHORT_WORDS) & (num_chars < _SHORT_CHARS)
    result: list[tuple[NDArray[np.bool_], str, str, float]] = []
    for name in sorted(limits, key=lambda name: (FEATURES.index(name[4:]), name)):
        feature, limit = name[4:], limits[name]
        values = features[:, FEATURES.index(feature)]
        violates = values < np.float32(limit) if name.startswith("min_") else values > np.float32(limit)
        if feature not in _OF_ANY_LENGTH:
            violates = violates & ~is_short
        if feature in _OF_SHORT_TEXTS:
            violates = violates & is_short
        result.append((violates, _REASONS[feature][name.startswith("max_")], feature, limit))
    return result


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
    code = _COMMENT.sub("", line)
    rest, num_literals = _LITERAL.subn("", code)
    letters = sum(map(str.isalpha, rest))
    return num_literals > 0 and letters < 0.25 * len(code.strip())


def _tighter(fixed: Limits, automatic: Limits) -> dict[str, float]:
    """The automatic limits, none of them wider than the fixed one, without those that no document can violate."""
    result: dict[str, float] = {}
    for name, value in automatic.items():
        is_max = name.startswith("max_")
        bound = fixed.get(name, value)
        value = min(value, bound) if is_max else max(value, bound)
        can_bite = value < 1 or not name.endswith("_fraction") if is_max else value > 0
        if can_bite:
            result[name] = value
    return result


def _quantile_limits(features: NDArray[np.float32], tail: float) -> dict[str, float]:
    """Limits at the tails' quantiles, moved outward by half their distance from the median, for documents of at least
    50 words. Where a distribution has no tail on one side, nothing is cut there.
    """
    long = features[features[:, FEATURES.index("num_words")] >= _SHORT_WORDS]
    result: dict[str, float] = {}
    if not len(long):
        return result
    low, middle, high = np.quantile(long, [tail, 0.5, 1 - tail], axis=0)
    for number, name in enumerate(FEATURES):
        if name in _NEVER_AUTOMATIC:
            continue
        if low[number] < middle[number]:
            result[f"min_{name}"] = float(1.5 * low[number] - 0.5 * middle[number])
        if high[number] > middle[number]:
            result[f"max_{name}"] = float(1.5 * high[number] - 0.5 * middle[number])
    return result


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
        _, first, counts = np.unique(rolled, return_index=True, return_counts=True)
        shares = np.where(counts > 1, counts * covered[first], 0)
        largest = max(largest, float(shares.max()) / num_chars)
    return largest


def _is_latin(text: str) -> bool:
    """Whether most of a text is in Latin script. In Chinese and Japanese a few characters say as much as a line of the
    commands between them.
    """
    head = text[:1000]
    return len(_LATIN.findall(head)) >= 0.5 * len(head) and len(_UNSPACED.findall(head)) <= 0.05 * len(head)
