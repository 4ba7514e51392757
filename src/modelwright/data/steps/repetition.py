"""Repetition: tables of data, and text that says the same line again and again.

A *data line* is one that is made of literals: after numbers, quoted strings, escapes and a trailing comment are taken
out, less than a quarter of it is letters of a program or a sentence. Code pages (`encodings.cp1252`), character tables
and dumps consist of data lines; a model would spend its capacity on copying them. Repeated lines are measured as in
Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, table A1: share of characters in duplicate lines).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.data.document import Document, Kind
from modelwright.data.steps.step import Drop

_LITERAL = re.compile(
    r"""[rbuRBU]{0,2}"(?:[^"\\]|\\.)*"|[rbuRBU]{0,2}'(?:[^'\\]|\\.)*'|\b0[xX][0-9a-fA-F]+\b|[-+]?\b\d[\w.]*"""
)
_MAY_BE_DATA = re.compile(r"""['"\d]""")
_COMMENT = re.compile(r"\s*(#|//).*$")


@dataclass(frozen=True, kw_only=True)
class RepetitionConfig:
    """Limits on repeated content (Gopher, Rae et al. 2021), as fractions of a document's characters."""

    max_data_fraction: float = 0.6
    """Most that may lie in lines of data (numbers, tables)."""
    max_duplicate_line_fraction: float = 0.3
    """Most that may lie in lines that occurred before in the same document."""
    max_duplicate_line_fraction_code: float = 0.6
    """The same for code, which repeats short lines by nature."""
    min_lines: int = constant(8)
    """Shorter documents are not judged."""

    def __post_init__(self) -> None:
        for name in ("max_data_fraction", "max_duplicate_line_fraction", "max_duplicate_line_fraction_code"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not between 0 and 1")


@dataclass(frozen=True)
class Repetition:
    config: RepetitionConfig
    name: str = "repetition"

    def __call__(self, documents: Iterator[Document], drop: Drop) -> Iterator[Document]:
        for document in documents:
            lines = [line for line in document.text.split("\n") if line.strip()]
            if len(lines) < self.config.min_lines:
                yield document
            elif duplicate_share(lines) > self._max_duplicate_share(document.kind):
                drop(document, "repeated lines")
            elif data_share(lines) > self.config.max_data_fraction:
                drop(document, "table of data")
            else:
                yield document

    def _max_duplicate_share(self, kind: Kind) -> float:
        return (
            self.config.max_duplicate_line_fraction_code if kind == "code" else self.config.max_duplicate_line_fraction
        )


def duplicate_share(lines: list[str]) -> float:
    """Share of the characters that stand in lines that stood before."""
    seen: set[str] = set()
    duplicate = total = 0
    for line in lines:
        total += len(line)
        if line in seen:
            duplicate += len(line)
        seen.add(line)
    return duplicate / max(1, total)


def data_share(lines: list[str]) -> float:
    """Share of the characters that stand in data lines."""
    data = sum(len(line) for line in lines if is_data_line(line))
    return data / max(1, sum(map(len, lines)))


def is_data_line(line: str) -> bool:
    """Whether a line holds literals and hardly anything else. A comment alone is no data."""
    if not _MAY_BE_DATA.search(line):
        return False
    code = _COMMENT.sub("", line)
    rest, num_literals = _LITERAL.subn("", code)
    letters = sum(map(str.isalpha, rest))
    return num_literals > 0 and letters < 0.25 * len(code.strip())
