"""The step privacy: finds personal data and secrets, and replaces them by markers, the same one for equal values.

The first e-mail address of a document becomes `<EMAIL_1>`, a second one `<EMAIL_2>`, every repetition of the first
`<EMAIL_1>` again. Only counts leave this module, never a value.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from modelwright.core.config import ConfigError, is_installed, word_for_none
from modelwright.data.clean.patterns import KINDS, Candidate, Finding, Pattern
from modelwright.data.clean.personal_data import CONTACTS, NUMBERS, PHONES
from modelwright.data.clean.secret_keys import SECRETS
from modelwright.data.clean.steps.step import StepSpec
from modelwright.data.document import Document, map_turn

PATTERNS: tuple[Pattern, ...] = (*SECRETS, *CONTACTS, *NUMBERS, *PHONES)
"""All patterns. Of overlapping matches, the one of the earlier pattern counts."""
_WITHOUT_ANCHORS = [number for number, pattern in enumerate(PATTERNS) if not pattern.anchors]
# Indices of the patterns in `PATTERNS` by anchor.
_BY_ANCHOR = {
    anchor: [number for number, pattern in enumerate(PATTERNS) if anchor in pattern.anchors]
    for anchor in dict.fromkeys(anchor for pattern in PATTERNS for anchor in pattern.anchors)
}
# Anchors by a character that each of them has: most texts lack an underscore, and with it 32 anchors at once. Those
# that have none of these characters are under "", which every text contains.
_BY_CHARACTER = {
    char: tuple(anchor for anchor in _BY_ANCHOR if next((one for one in "_~@/:-." if one in anchor), "") == char)
    for char in ("", *"_~@/:-.")
}
# The record's own identifier and URL must survive numbers that merely identify, such as an IP address or a card number.
_FIELDS = ("id", "url")
_PHONE_REGIONS = ("US", "GB", "DE", "FR", "ES", "IT", "CN", "JP", "IN", "BR")
_KINDS_IN_FIELDS = ("email", "credentials", "secret")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Detection of personal data and secrets."""

    replace: tuple[str, ...] = field(default=KINDS, metadata=word_for_none())
    """Kinds of values that are replaced: email, phone, ip, card, iban, national_id, credentials and secret; or none."""
    phone_regions: tuple[str, ...] = _PHONE_REGIONS
    """Countries (ISO 3166) whose national phone numbers are recognized; international ones (`+49 ...`) always are."""

    def __post_init__(self) -> None:
        for kind in self.replace:
            if kind not in KINDS:
                raise ConfigError(f"replace: {kind!r} is not one of {', '.join(KINDS)}; none replaces nothing")
        if self.phone_regions == _PHONE_REGIONS or not is_installed("clean"):  # without it, no number is recognized
            return
        from phonenumbers import SUPPORTED_REGIONS

        for region in self.phone_regions:
            if region not in SUPPORTED_REGIONS:
                raise ConfigError(f"phone_regions: {region!r} is not a country code such as DE")


@dataclass(frozen=True)
class Privacy:
    config: PrivacyConfig
    name: str = "privacy"
    replaced: Counter[str] = field(default_factory=Counter, compare=False)
    """Values replaced in documents that were not dropped, by kind."""
    failures: Counter[str] = field(default_factory=Counter, compare=False)
    """Exceptions of the check of each pattern; the text stayed unchanged."""

    def __call__(self, document: Document) -> Document:
        """Returns the document with markers in place of values."""
        changed, counts = self._replace(document)
        self.replaced.update(counts)
        return changed

    def redact(self, document: Document) -> Document:
        """Replaces the values of a dropped document, without counting them."""
        return self._replace(document)[0]

    def take_counts(self) -> dict[str, dict[str, int]]:
        counts = {"replaced": dict(self.replaced), "failed_validators": dict(self.failures)}
        self.replaced.clear()
        self.failures.clear()
        return counts

    def _replace(self, document: Document) -> tuple[Document, Counter[str]]:
        """Returns the changed document, and the number of replaced values by kind."""
        if not self.config.replace:
            return document, Counter()
        markers: dict[tuple[str, str], str] = {}
        numbers = Counter[str]()
        counts_of: dict[str, Counter[str]] = {}  # by text, of the kinds that were found in it

        def mark(text: str, kinds: Sequence[str] = KINDS) -> str:
            findings = find(
                text,
                [kind for kind in kinds if kind in self.config.replace],
                is_code=document.kind == "code",
                regions=self.config.phone_regions,
                failures=self.failures,
            )
            counts_of[text] = Counter(finding.kind for finding in findings)
            parts, at = [], 0
            for finding in findings:
                key = (finding.kind, finding.value)
                if key not in markers:
                    numbers[finding.kind] += 1
                    markers[key] = f"<{finding.kind.upper()}_{numbers[finding.kind]}>"
                parts += [text[at : finding.start], markers[key]]
                at = finding.end
            return "".join([*parts, text[at:]])

        changed = document.map_text(mark)
        fields = {name: document.meta[name] for name in _FIELDS if isinstance(document.meta.get(name), str)}
        redacted = {name: mark(value, kinds=_KINDS_IN_FIELDS) for name, value in fields.items()}
        changed = replace(changed, meta={**changed.meta, **redacted})
        if not markers:
            return document, Counter()
        # Counted by turn: the title and the summary repeat values of the text.
        turns = [*document.messages, *document.rejected] if document.kind == "qa" else []
        parts = list[str]() if turns else [document.text]
        for turn in turns:
            map_turn(turn, lambda text: parts.append(text) or text)
        return changed, sum((counts_of[part] for part in parts), Counter[str]())


PRIVACY = StepSpec(
    name="privacy",
    build=lambda config, seed: Privacy(config),
    needs_clean=lambda config: ["replace"] if config.replace else [],
)


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
            # After an equals sign there may be any number: of a query, or of an assignment.
            is_assigned = pattern.context is not None and text[start - 1 : start] == "="
            if (needs_name or is_assigned) and (pattern.context is None or not candidate.is_named(pattern.context)):
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
    anchors = chain.from_iterable(of for char, of in _BY_CHARACTER.items() if char in lowered)
    numbers = set(chain.from_iterable(map(_BY_ANCHOR.__getitem__, filter(lowered.__contains__, anchors))))
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
