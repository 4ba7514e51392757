"""Reward 1 for an answer whose number equals the reference answer's, else 0.

Finds numbers in the text and LaTeX of answers, as exact fractions. Nothing is evaluated.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from modelwright.core.config import ConfigError
from modelwright.reward.reward import Reward, Sample, Score, read_reference

MAX_EXPONENT = 400
"""A double ends at 10^308. A fraction of a larger power would take memory in proportion."""
MAX_DIGITS = 400
MAX_TEXT = 20_000
"""Number of characters at the end of an answer that are searched for the last number."""

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{2,3}){0,12},\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_BRACED = rf"\{{\s*([-+]?{_DECIMAL})\s*\}}"
_POWER = r"10\s*\^\s*(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d{1,4}))"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}.])[-+])?
    (?:[€£¥]\s?)?
    (?:
        (?P<whole>\d+\s*)?\\[dt]?frac\s*(?:{_BRACED}|(\d))\s*(?:{_BRACED}|(\d))
      | (?<!\^)(?<!\^\{{)(?:
          (?P<mixed>\d+)\s+(?P<top>\d+)/(?P<bottom>\d+)(?![\d/])
        | (?P<numerator>{_DECIMAL})\s*/\s*(?P<denominator>{_DECIMAL})(?![\d/])
        | {_POWER}
        | (?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d+)(?!\w)|\s*(?:\\times|\\cdot|×|\*)\s*{_POWER})?
      )
    )
    (?P<percent>\s*(?:%|percent\b))?
    """,
    re.VERBOSE,
)
_UNIT = re.compile(r"\\(?:text|textbf|mathrm|mbox|operatorname)\s*\{([^{}]*)\}(?:\s*\^\s*(?:\{\d\}|\d))?")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_GROUP_SPACE = re.compile(r"(?<=\d)[ ~](?=\d{3}(?!\d))")
# "1 000 000", and with a no-break or thin space "12 000". One group after a plain space may be two numbers.
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?: \d{3}){2,}|(?:[\u00a0\u2009\u202f~]\d{3})+)(?!\d)")


@dataclass(frozen=True)
class Number:
    value: Fraction
    is_percent: bool = False
    """True if a percent sign follows; `value` is the number before the sign."""


def numbers_in(text: str) -> Iterator[Number]:
    """Yields all numbers, in order: decimals with thousands separators, exponents, fractions `3/4` and `\\frac{3}{4}`,
    mixed numbers. Fractions with the denominator 0 and numbers too long to be an answer are left out.
    """
    yield from filter(None, map(_number, _NUMBER.finditer(_plain(text))))


def last_number(text: str) -> Number | None:
    matches = list(_NUMBER.finditer(_plain(text[-MAX_TEXT:])))
    return next(filter(None, map(_number, reversed(matches))), None)


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}`, or of `\\boxed 5`; None without one that ends."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.lstrip().startswith("{"):
        words = rest.replace("$", " ").split()
        return words[0] if words else None
    rest = rest.lstrip()
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place]
    return None


def boxed_number(content: str) -> Number | None:
    """The only number of a box, apart from units and the left side of an equation; None if there are several."""
    bare = _UNIT.sub(" ", content)
    if not any(character.isdigit() for character in bare):
        bare = _UNIT.sub(r"\1", content)
    bare = _GROUP_SPACE.sub("", _DEGREES.sub("", bare).replace("\\,", "").replace("\\ ", " "))
    numbers = list(numbers_in(bare.rpartition("=")[2][:MAX_TEXT]))
    return numbers[0] if len(numbers) == 1 else None


def equal(one: Number, other: Number, tolerance: float) -> bool:
    """Returns True if two numbers differ by at most `tolerance` times the second one's magnitude.

    If only one of them is a percentage, it may count as written (25% and 25, as in the graders of MATH) or as a
    hundredth (25% and 0.25).
    """
    values = [one.value]
    if one.is_percent != other.is_percent:
        values.append(one.value / 100 if one.is_percent else one.value * 100)
    # Relative to 1 where the reference is 0, which would allow no difference at all
    limit = Fraction(tolerance) * (abs(other.value) or 1)
    return any(abs(value - other.value) <= limit for value in values)


def _plain(text: str) -> str:
    for old, new in (("\u2212", "-"), ("{,}", ","), ("\\!", ""), ("\\$", ""), ("$", ""), ("\\%", "%")):
        text = text.replace(old, new)
    return _GROUPED.sub(lambda group: re.sub(r"\D", "", group[0]), text)


def _number(match: re.Match[str]) -> Number | None:
    whole, top_braced, top, bottom_braced, bottom = match.group("whole", 3, 4, 5, 6)
    if top_braced or top:
        value = _quotient(top_braced or top, bottom_braced or bottom, whole or "0")
    elif match["mixed"]:
        value = _quotient(match["top"], match["bottom"], match["mixed"])
    elif match["numerator"]:
        value = _quotient(match["numerator"], match["denominator"], "0")
    else:
        # Groups 12 and 13 are the exponent of a power alone, 16 and 17 that of a factor; both use `_POWER`.
        power = next((text for text in match.group(12, 13, "exponent", 16, 17) if text), "0")
        value = _scaled(match["decimal"] or "1", power)
    if value is None:
        return None
    return Number(-value if match["sign"] == "-" else value, match["percent"] is not None)


def _quotient(top: str, bottom: str, whole: str) -> Fraction | None:
    numerator, denominator, integer = (_scaled(text, "0") for text in (top, bottom, whole.strip()))
    if numerator is None or denominator is None or integer is None or denominator == 0:
        return None
    return integer + numerator / denominator


def _scaled(decimal: str, power: str) -> Fraction | None:
    if len(decimal) > MAX_DIGITS or len(power) > 5 or abs(int(power)) > MAX_EXPONENT:
        return None
    return Fraction(decimal.replace(",", "")) * Fraction(10) ** int(power)


MARKER = "####"
"""Text before the final answer in GSM8K (Cobbe et al. 2021)."""


@dataclass(frozen=True, kw_only=True)
class NumericMatchConfig:
    """Equality of the final number with the reference answer's."""

    field: str = "answer"
    """The record's field with the reference answer: a number, or a text with one, such as GSM8K's whole solution."""
    number_in: Literal["any", "boxed", "marker", "last"] = "any"
    """Place of the number in the answer: the last `\\boxed{}`, after the last `####`, the last number of the text, or
    the first of the three that exists."""
    tolerance: float = 0.0
    """Largest difference, relative to the reference; 0 compares exactly, as fractions."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ConfigError(f"tolerance: must be from 0 to less than 1, got {self.tolerance}")

    def build(self, name: str) -> Reward:
        return NumericMatch(name, self)


@dataclass(frozen=True)
class NumericMatch:
    name: str
    config: NumericMatchConfig

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        scores: list[Score] = []
        for sample in samples:
            reference = read_reference(sample, self.config.field)
            right = [number for text in reference.texts if (number := final_number(text, "any"))]
            if reference.problem:
                scores.append(Score.failure("no_reference", reference.problem))
            elif not right:
                text = f"the field {self.config.field!r} holds no number: {reference.texts[0][:80]!r}"
                scores.append(Score.failure("reference_not_numeric", text))
            elif (number := final_number(sample.answer, self.config.number_in)) is None:
                scores.append(Score(0.0, "no_number"))
            else:
                is_equal = any(equal(number, one, self.config.tolerance) for one in right)
                scores.append(Score(float(is_equal), "equal" if is_equal else "different"))
        return scores


def final_number(text: str, where: str) -> Number | None:
    """Finds the number that a text gives as its result; None if this place does not have one."""
    if where in ("any", "boxed"):
        content = last_boxed(text)
        if content is not None or where == "boxed":
            return None if content is None else boxed_number(content)
    if where in ("any", "marker"):
        marker, result = text.rpartition(MARKER)[1:]
        if marker or where == "marker":
            return next(numbers_in(result.strip().partition("\n")[0]), None) if marker else None
    return last_number(text)
