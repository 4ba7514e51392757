"""Patterns of personal data: an expression, the words that must or must not be near, and a check."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

KINDS = ("email", "phone", "ip", "card", "iban", "national_id", "credentials", "secret")
"""credentials: user name and password in a URL; secret: API keys, tokens and private keys."""

# Distance of words of context: about a sentence before, and a few words after.
_CHARS_BEFORE, _CHARS_AFTER = 60, 30


@dataclass(frozen=True)
class Finding:
    """A value in a text: its kind, where it is, and a canonical form by which equal values are recognized."""

    kind: str
    start: int
    end: int
    value: str = field(repr=False)


@dataclass(frozen=True)
class Candidate:
    """A match of a pattern, before its check."""

    text: str = field(repr=False)
    start: int
    end: int
    is_code: bool
    regions: tuple[str, ...]
    """Countries whose national phone numbers are recognized."""

    @property
    def value(self) -> str:
        return self.text[self.start : self.end]

    @property
    def before(self) -> str:
        """The text before the candidate that is context."""
        return self.text[max(0, self.start - _CHARS_BEFORE) : self.start]

    @property
    def after(self) -> str:
        return self.text[self.end : self.end + _CHARS_AFTER]

    def is_named(self, words: re.Pattern[str]) -> bool:
        """True if one of the words is near."""
        return bool(words.search(self.before) or words.search(self.after))

    def follows(self, words: re.Pattern[str]) -> bool:
        """True if one of the words is right before the candidate; the expression ends in `$`."""
        return bool(words.search(self.before))

    def cut(self, value: str, *, start: int = 0, end: int | None = None) -> "Match":
        """The part of the candidate from `start` to `end` (offsets in it) with the canonical form `value`."""
        return Match(self.start + start, self.end if end is None else self.start + end, value)


@dataclass(frozen=True)
class Match:
    """The part of a candidate that is personal data, and its canonical form."""

    start: int
    end: int
    value: str = field(repr=False)


Check = Callable[[Candidate], Match | None]
"""Decides by check digits or a library's rules whether a candidate is a value, and selects the part that is."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A form of a kind of value."""

    kind: str
    name: str
    """Identifies the pattern in reports, e.g. the module of `python-stdnum` that checks it."""
    regex: re.Pattern[str]
    """Expression of a candidate, which is its group `value` if it has one, else the whole match."""
    check: Check
    anchors: tuple[str, ...] = ()
    """Lower-case texts of which one occurs in every text with a match; the search is skipped where none does."""
    shape: re.Pattern[str] | None = None
    """A cheap expression that matches in every text with a match; patterns share it, and its result."""
    context: re.Pattern[str] | None = None
    """Words that name the value."""
    needs_context: Literal["never", "in code", "always"] = "never"
    unless: re.Pattern[str] | None = None
    """Words right before a value that only looks like one; the expression ends in `$`."""


def ascii_regex(pattern: str) -> re.Pattern[str]:
    r"""Compiles an expression whose `\w`, `\d` and `\b` know ASCII only, so that a value may touch Chinese text."""
    return re.compile(pattern, re.ASCII)


def words(pattern: str) -> re.Pattern[str]:
    """Compiles an expression for words of context, in any case."""
    return re.compile(pattern, re.IGNORECASE)


def whole(candidate: Candidate) -> Match:
    """Accepts a candidate whose pattern needs no check."""
    return candidate.cut(candidate.value)


DIGITS = ascii_regex(r"\d(?:[^\w\n]{0,3}\d){6}")
"""Seven digits close together: every number that names a person or an account has a match."""
OTHER_NUMBER = words(
    r"(?:\b(?:order|invoice|tracking|ticket|part|serial|batch|product|item|model|article|case|sku|upc|ean|isbn|issn|doi|"
    r"barcode|timestamp|epoch|build|commit|hash|checksum|crc|seed|merged?|rev|sha|blob|object|offset|inode|size|bytes|revision|reference|ref|"
    r"bestell\w*|auftrag\w*|rechnung\w*|artikel\w*|commande|facture|référence|pedido|factura|fatura|nota fiscal)\b|"
    r"订单|单号|编号|快递|注文|伝票|品番)"
    r"(?:\s*(?:number|numbers|nummer|id|code|no|nr|n°|nº|num|número|numéro|is|was|ist|est|es|号码?|番号|は|为|是))*"
    r"[\s.:：#=°º(\"'“「]*$"
)
"""Words that name a number other than that of a card, a person or a telephone."""
