"""Normalize: one spelling of the same text, and no bytes that are no text.

Unicode NFC, line ends as LF, no byte order marks, control characters or trailing spaces, at most two blank lines in a
row (one page break less). Documents that were binary data are dropped.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from modelwright.core.errors import ConfigError
from modelwright.data.document import Document
from modelwright.data.steps.step import Drop

_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ufeff\ufffe\uffff]")
_LINE_END = re.compile("\r\n?|[\x0c\x85\u2028\u2029]")
_TRAILING_SPACE = re.compile(r"[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{4,}")


@dataclass(frozen=True, kw_only=True)
class NormalizeConfig:
    """Unicode and whitespace normalization."""

    max_control_fraction: float = 0.05
    """A text with a larger fraction of control and replacement characters is dropped as binary data."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_control_fraction <= 1:
            raise ConfigError(f"max_control_fraction: {self.max_control_fraction} is not between 0 and 1")


@dataclass(frozen=True)
class Normalize:
    config: NormalizeConfig
    name: str = "normalize"

    def __call__(self, documents: Iterator[Document], drop: Drop) -> Iterator[Document]:
        for document in documents:
            if control_share(document.text) > self.config.max_control_fraction:
                drop(document, "binary data")
            else:
                yield document.map_text(normalize)


def control_share(text: str) -> float:
    """Share of the characters that are control or replacement characters."""
    return (len(_CONTROL.findall(text)) + text.count("\ufffd")) / max(1, len(text))


def normalize(text: str) -> str:
    """The normal form; normalizing it again changes nothing."""
    text = _CONTROL.sub("", _LINE_END.sub("\n", text))
    text = unicodedata.normalize("NFC", text)
    return _BLANK_LINES.sub("\n\n\n", _TRAILING_SPACE.sub("", text)).strip("\n")
