"""The step privacy: replaces personal data and secrets by markers, the same one for equal values.

`data/clean/personal_data` finds the values. The first e-mail address of a document becomes `<EMAIL_1>`, a second one
`<EMAIL_2>`, every repetition of the first `<EMAIL_1>` again. Only counts leave this module, never a value.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import phonenumbers

from modelwright.core.config import word_for_none
from modelwright.core.errors import ConfigError
from modelwright.data.clean.personal_data.find import find
from modelwright.data.clean.personal_data.pattern import KINDS
from modelwright.data.clean.steps.step import StepSpec
from modelwright.data.document import Document, map_turn

# The record's own identifier and URL must survive numbers that merely identify, such as an IP address or a card number.
_FIELDS = ("id", "url")
_KINDS_IN_FIELDS = ("email", "credentials", "secret")
_MARKERS = {kind: kind.upper() for kind in KINDS}


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Detection of personal data and secrets."""

    replace: tuple[str, ...] = field(default=KINDS, metadata=word_for_none())
    """Kinds of values that are replaced: email, phone, ip, card, iban, national_id, credentials and secret; or none."""
    phone_regions: tuple[str, ...] = ("US", "GB", "DE", "FR", "ES", "IT", "CN", "JP", "IN", "BR")
    """Countries (ISO 3166) whose national phone numbers are recognized; international ones (`+49 ...`) always are."""

    def __post_init__(self) -> None:
        for kind in self.replace:
            if kind not in KINDS:
                raise ConfigError(f"replace: {kind!r} is not one of {', '.join(KINDS)}; none replaces nothing")
        for region in self.phone_regions:
            if region not in phonenumbers.SUPPORTED_REGIONS:
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
        replacer = _Replacer(self.config, document.kind == "code", self.failures)
        changed = document.map_text(replacer)
        fields = {name: document.meta[name] for name in _FIELDS if isinstance(document.meta.get(name), str)}
        redacted = {name: replacer(value, kinds=_KINDS_IN_FIELDS) for name, value in fields.items()}
        changed = replace(changed, meta={**changed.meta, **redacted})
        if not replacer.markers:
            return document, Counter()
        # Counted by turn: the title and the summary repeat values of the text.
        turns = [*document.messages, *document.rejected] if document.kind == "qa" else []
        parts = list[str]() if turns else [document.text]
        for turn in turns:
            map_turn(turn, lambda text: parts.append(text) or text)
        return changed, sum((replacer.counts[part] for part in parts), Counter[str]())


PRIVACY = StepSpec(name="privacy", build=lambda config, seed: Privacy(config))


@dataclass
class _Replacer:
    """Replaces values in the texts of one document. counts: by text, of the kinds that were found in it."""

    config: PrivacyConfig
    is_code: bool
    failures: Counter[str]
    markers: dict[tuple[str, str], str] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def __call__(self, text: str, kinds: Sequence[str] = KINDS) -> str:
        findings = find(
            text,
            [kind for kind in kinds if kind in self.config.replace],
            is_code=self.is_code,
            regions=self.config.phone_regions,
            failures=self.failures,
        )
        self.counts[text] = Counter(finding.kind for finding in findings)
        parts, at = [], 0
        for finding in findings:
            key = (finding.kind, finding.value)
            if key not in self.markers:
                self.numbers[finding.kind] += 1
                self.markers[key] = f"<{_MARKERS[finding.kind]}_{self.numbers[finding.kind]}>"
            parts += [text[at : finding.start], self.markers[key]]
            at = finding.end
        return "".join([*parts, text[at:]])
