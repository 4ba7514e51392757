"""Searches a text for all kinds of personal data."""

import re
from collections import Counter
from collections.abc import Sequence

from modelwright.data.clean.personal_data.contacts import CONTACTS, PHONES
from modelwright.data.clean.personal_data.numbers import NUMBERS
from modelwright.data.clean.personal_data.pattern import Candidate, Finding, Pattern
from modelwright.data.clean.personal_data.secret_keys import SECRETS

PATTERNS: tuple[Pattern, ...] = (*SECRETS, *CONTACTS, *NUMBERS, *PHONES)
"""All patterns. Of overlapping matches, the one of the earlier pattern counts."""

_WITHOUT_ANCHORS = [number for number, pattern in enumerate(PATTERNS) if not pattern.anchors]
# Indices of the patterns in `PATTERNS` by anchor.
_BY_ANCHOR = {
    anchor: [number for number, pattern in enumerate(PATTERNS) if anchor in pattern.anchors]
    for anchor in dict.fromkeys(anchor for pattern in PATTERNS for anchor in pattern.anchors)
}


def find(
    text: str, kinds: Sequence[str], *, is_code: bool = False, regions: tuple[str, ...] = (), failures: Counter[str]
) -> list[Finding]:
    """Finds the values in a text, in order and without overlaps.

    kinds: kinds that are searched for. regions: countries (ISO 3166) whose national phone numbers are recognized.
    is_code: the text is source code, where numbers need words that name them. failures: counts the exceptions of the
    checks by pattern; such a candidate is not a finding.
    """
    result: list[Finding] = []
    taken = bytearray(len(text))  # a byte for each character: 1 inside a finding
    for pattern in patterns_for(text, kinds):
        needs_name = pattern.needs_context == "always" or (pattern.needs_context == "in code" and is_code)
        for found in pattern.regex.finditer(text):
            start, end = found.span("value" if "value" in pattern.regex.groupindex else 0)
            candidate = Candidate(text, start, end, is_code, regions)
            if taken.find(1, start, end) >= 0 or (pattern.unless is not None and candidate.follows(pattern.unless)):
                continue
            if needs_name and (pattern.context is None or not candidate.is_named(pattern.context)):
                continue
            try:
                match = pattern.check(candidate)
            except Exception:  # a fault of a library on one text must not end a run over millions
                failures[pattern.name] += 1
                continue
            if match is not None:
                taken[match.start : match.end] = b"\x01" * (match.end - match.start)
                result.append(Finding(pattern.kind, match.start, match.end, match.value))
    return sorted(result, key=lambda finding: finding.start)


def patterns_for(text: str, kinds: Sequence[str]) -> list[Pattern]:
    """Selects the patterns that can match the text: most texts lack a pattern's anchors and need no search."""
    lowered = text.lower()
    numbers = {number for anchor, own in _BY_ANCHOR.items() if anchor in lowered for number in own}
    shapes: dict[re.Pattern[str], bool] = {}
    result: list[Pattern] = []
    for number in sorted(numbers.union(_WITHOUT_ANCHORS)):
        pattern = PATTERNS[number]
        shape = pattern.shape
        if shape is not None and shape not in shapes:
            shapes[shape] = shape.search(text) is not None
        if pattern.kind in kinds and (shape is None or shapes[shape]):
            result.append(pattern)
    return result
