"""Format: repairs encodings and markup, and gives equal texts one spelling.

In this order: markup to text, broken encodings (by `data/clean/mojibake.py` and ftfy), line ends as LF, no byte order
marks or control characters, Unicode NFC, no trailing spaces, at most two blank lines in a row, and URLs as configured.
Documents that were binary data are dropped. Source code keeps its markup, its URLs and its spelling of characters.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

import ftfy
from ftfy.badness import is_bad
from resiliparse.extract.html2text import extract_plain_text  # pyright: ignore[reportMissingModuleSource]

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.data.clean.mojibake import repair
from modelwright.data.clean.steps.step import Drop, StepSpec
from modelwright.data.document import Document

URL_MARKER = "<URL>"
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ufeff\ufffe\uffff]")
_LINE_END = re.compile("\r\n?|[\x0c\x85\u2028\u2029]")
_TRAILING_SPACE = re.compile(r"[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{4,}")
# Soft hyphens, zero-width spaces and direction marks. Joiners (U+200C, U+200D) stay: scripts and emoji need them.
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u206a-\u206f]")
_URL = re.compile(r"\b(?:https?|ftp)://[^\s<>\"'`\]\)}]+|\bwww\.[\w-]+\.[^\s<>\"'`\]\)}]+")
_TAG = re.compile(
    r"</?(?:html|head|body|div|span|p|br|a|b|i|em|strong|ul|ol|li|table|tr|td|th|h[1-6]|script|style|img|section|"
    r"article|header|footer|nav|form|input|button|meta|link|title)\b[^<>]*>",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class FormatConfig:
    """Repair of encodings and markup, normalization of characters and white space."""

    max_control_fraction: float = constant(0.05)
    """A text with a larger fraction of control and replacement characters is dropped as binary data."""
    repair_encoding: bool = constant(True)
    """Repair text that was decoded with the wrong encoding (`cafÃ©` to `café`), except in code."""
    html: Literal["to_text", "keep"] = "to_text"
    """Extract the text of prose that is marked up in HTML; web pages (`.html`) are always read as text."""
    urls: Literal["keep", "mark", "remove"] = "keep"
    """Treatment of URLs outside of code: `keep` leaves them, `mark` replaces each by `<URL>`, `remove` deletes them."""
    min_html_tags: int = constant(3)
    """Fewer tags are taken for text about HTML."""
    min_html_fraction: float = constant(0.05)
    """A smaller fraction of characters in tags is taken for text about HTML."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_control_fraction <= 1:
            raise ConfigError(f"max_control_fraction: {self.max_control_fraction} is not between 0 and 1")


@dataclass(frozen=True)
class Format:
    config: FormatConfig
    name: str = "format"

    def __call__(self, document: Document) -> Document | Drop:
        share = control_share(document.text)
        if share > self.config.max_control_fraction and document.kind != "code":
            # UTF-8 that was read as Latin-1 is full of control characters.
            document = document.map_text(self._decoded)
            share = control_share(document.text)
        if share > self.config.max_control_fraction:
            return Drop("binary data", f"{share:.1%} control characters, limit {self.config.max_control_fraction:.1%}")
        if document.kind == "code":
            return document.map_text(normalize)
        markup = False
        if document.kind == "prose" and self.config.html == "to_text":
            text = document.text
            tags = [len(tag) for tag in _TAG.findall(text)] if "</" in text or "<br" in text.lower() else []
            is_markup = sum(tags) >= self.config.min_html_fraction * len(text)
            markup = is_markup and len(tags) >= self.config.min_html_tags
        return document.map_text(lambda text: self._repaired(text, markup))

    def _repaired(self, text: str, markup: bool) -> str:
        if markup:
            text = extract_plain_text(text, alt_texts=False, skip_elements=["nav", "footer"])
        if not text.isascii():
            text = _INVISIBLE.sub("", self._decoded(text))
        if self.config.urls != "keep":
            text = _URL.sub(URL_MARKER if self.config.urls == "mark" else "", text)
        return normalize(text)

    def _decoded(self, text: str) -> str:
        if not self.config.repair_encoding or text.isascii():
            return text
        text = repair(text)  # first, because ftfy changes parts of what it does not know
        return ftfy.fix_encoding(text) if is_bad(text) else text


FORMAT = StepSpec(name="format", build=lambda config, seed: Format(config))


def control_share(text: str) -> float:
    """Share of the characters that are control or replacement characters."""
    if _CONTROL.search(text) is None and "\ufffd" not in text:
        return 0.0
    return (len(_CONTROL.findall(text)) + text.count("\ufffd")) / max(1, len(text))


def normalize(text: str) -> str:
    """The normal form; normalizing it again changes nothing."""
    if _LINE_END.search(text):
        text = _LINE_END.sub("\n", text)
    if _CONTROL.search(text):
        text = _CONTROL.sub("", text)
    text = unicodedata.normalize("NFC", text)
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        text = _TRAILING_SPACE.sub("", text)
    return _BLANK_LINES.sub("\n\n\n", text).strip("\n")
