"""Privacy: finds personal data and secrets in a text and replaces them by markers, the same one for equal values.

Candidates are found by regular expressions and accepted by their check digits or by a library that knows the rules:
phone numbers by `phonenumbers`, IBAN, national and tax numbers by `python-stdnum`, addresses by `ipaddress`, cards by
Luhn's algorithm and the issuers' prefixes. A value that is not valid stays. Numbers that many harmless texts contain
(a Spanish tax number is eight digits and a letter) count only near a word that names them.

The first e-mail address of a document becomes `<EMAIL_1>`, a second one `<EMAIL_2>`, every repetition of the first
`<EMAIL_1>` again. Only counts leave this module, never a value.
"""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

import phonenumbers
from phonenumbers import Leniency, PhoneNumberMatcher

from modelwright.core.errors import ConfigError
from modelwright.data.document import Document

KINDS = ("email", "phone", "ip", "card", "iban", "national_id", "credentials", "secret")
"""credentials: user name and password in a URL; secret: API keys, tokens and private keys."""

_MARKERS = {kind: kind.upper() for kind in KINDS}
_MAYBE = re.compile(
    r"@|::|://|-----BEGIN|xox|[A-Za-z0-9+/_\-]{20}|[A-Z]{2}\d\d|\d[\d \t.\-/()\u2010-\u2015\u00a0]{5,}\d|"
    r"\d\.\d+\.\d|[0-9A-Fa-f]{1,4}:[0-9A-Fa-f]{1,4}:"
)
"""Every value of any kind has a match; most documents have none."""

_EMAIL = re.compile(
    r"(?<![\w.+\-/:@])[A-Za-z0-9_](?:[\w.+%\-]{0,62}[\w+%\-])?@(?:[A-Za-z0-9\u00a1-\uffff](?:[A-Za-z0-9\u00a1-\uffff\-]{0,61}"
    r"[A-Za-z0-9\u00a1-\uffff])?\.)+(?:[A-Za-z\u00a1-\uffff]{2,24}|xn--[a-z0-9\-]{2,40})(?![\w@])"
)
_CREDENTIALS = re.compile(
    r"\b([A-Za-z][A-Za-z0-9+.\-]{1,15}://)([^\s/:@'\"<>{}$]{1,100}:[^\s/@'\"<>{}$]{1,200})@(?=[\w\[])"
)
_IPV4 = re.compile(r"(?<![\w.\-/])(?:\d{1,3}\.){3}\d{1,3}(?![\w.\-]*\w|/\d*\.)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:[0-9A-Fa-f]{1,4}|(?:\d{1,3}\.){3}\d{1,3})?(?![\w:.])")
_CARD = re.compile(r"(?<![\w.\-])\d(?:[ \-]?\d){11,18}(?![\w\-]|\.\d)")
_IBAN = re.compile(r"(?<![\w])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{2,4}){3,8}(?: ?[A-Z0-9]{1,3})?(?!\w)")
_DIGITS = re.compile(r"(?<![\w.])(?:\+|00)?\(?\d[\d \t.\-/()\u2010-\u2015\u00a0]{5,22}\d(?![\w])")
_SSN = re.compile(r"(?<![\w\-])\d{3}-\d{2}-\d{4}(?![\w\-])")
_RESIDENT_ID = re.compile(r"(?<!\w)\d{17}[\dXx](?!\w)")

_SECRETS = (
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]{20,8000}?"
    r"-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    r"(?<!\w)(?:AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{16}(?!\w)",
    r"(?<!\w)gh[pousr]_[A-Za-z0-9]{36,255}(?!\w)",
    r"(?<!\w)github_pat_[A-Za-z0-9_]{50,255}(?!\w)",
    r"(?<!\w)glpat-[A-Za-z0-9_\-]{20,64}(?!\w)",
    r"(?<!\w)xox[abeoprs]-[A-Za-z0-9\-]{10,250}(?!\w)",
    r"(?<!\w)(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,247}(?!\w)",
    r"(?<!\w)sk-(?:ant-|proj-|svcacct-)?[A-Za-z0-9_\-]{20,250}(?!\w)",
    r"(?<!\w)AIza[A-Za-z0-9_\-]{35}(?!\w)",
    r"(?<!\w)ya29\.[A-Za-z0-9_\-]{20,500}(?!\w)",
    r"(?<!\w)hf_[A-Za-z0-9]{30,64}(?!\w)",
    r"(?<!\w)npm_[A-Za-z0-9]{36}(?!\w)",
    r"(?<!\w)pypi-[A-Za-z0-9_\-]{40,500}(?!\w)",
    r"(?<!\w)SG\.[A-Za-z0-9_\-]{16,64}\.[A-Za-z0-9_\-]{16,64}(?!\w)",
    r"(?<!\w)eyJ[A-Za-z0-9_\-]{10,2000}\.eyJ[A-Za-z0-9_\-]{10,4000}\.[A-Za-z0-9_\-]{10,2000}(?!\w)",
)
_SECRET = re.compile("|".join(_SECRETS))
_ASSIGNED_SECRET = re.compile(
    r"(?i)(?<![a-z])(?:api[_\-]?key|secret[_\-]?key|access[_\-]?token|auth[_\-]?token|client[_\-]?secret|password|passwd)"
    r"[\"']?\s{0,3}(?::|=|=>)\s{0,3}[\"']?([A-Za-z0-9+/_\-]{20,128}={0,2})(?![\w+/])"
)

_NATIONAL = {
    "us.ssn": (_SSN, ""),
    "cn.ric": (_RESIDENT_ID, ""),
    "gb.nino": (re.compile(r"(?<!\w)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?\d{2} ?\d{2} ?\d{2} ?[A-D](?!\w)"), ""),
    "it.codicefiscale": (re.compile(r"(?<!\w)[A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z](?!\w)"), ""),
    "es.dni": (re.compile(r"(?<!\w)\d{8}-?[A-HJ-NP-TV-Z](?!\w)"), ""),
    "es.nie": (re.compile(r"(?<!\w)[XYZ]-?\d{7}-?[A-HJ-NP-TV-Z](?!\w)"), ""),
    "fr.nir": (re.compile(r"(?<!\w)[12] ?\d{2} ?\d{2} ?(?:\d{2}|2[AB]) ?\d{3} ?\d{3} ?\d{2}(?!\w)"), ""),
    "br.cpf": (re.compile(r"(?<!\w)\d{3}\.\d{3}\.\d{3}-\d{2}(?!\w)"), ""),
    "kr.rrn": (re.compile(r"(?<!\w)\d{6}-[1-8]\d{6}(?!\w)"), ""),
    "se.personnummer": (re.compile(r"(?<!\w)\d{6}(?:\d{2})?[-+]\d{4}(?!\w)"), ""),
    "fi.hetu": (re.compile(r"(?<!\w)\d{6}[-+A-FU-Y]\d{3}[0-9A-FHJ-NPR-Y](?!\w)"), ""),
    "in_.aadhaar": (re.compile(r"(?<!\w)[2-9]\d{3} \d{4} \d{4}(?!\w)"), ""),
    "pl.pesel": (re.compile(r"(?<!\w)\d{11}(?!\w)"), r"pesel"),
    "de.idnr": (re.compile(r"(?<!\w)\d{2} ?\d{3} ?\d{3} ?\d{3}(?!\w)"), r"steuer|identifikationsnummer|idnr|tax id"),
    "nl.bsn": (re.compile(r"(?<!\w)\d{9}(?!\w)"), r"bsn|burgerservice|sofi"),
    "jp.in_": (re.compile(r"(?<!\w)\d{4} ?\d{4} ?\d{4}(?!\w)"), r"マイナンバー|個人番号|my number"),
    "be.nn": (re.compile(r"(?<!\w)\d{2}\.\d{2}\.\d{2}-\d{3}\.\d{2}(?!\w)"), ""),
}  # fmt: skip
"""Modules of `python-stdnum` with what a candidate looks like, and the words of which one must precede it; "" for
none."""
_WITHOUT_CHECK_DIGITS = frozenset({"gb.nino"})
"""Numbers that have no check digits, and so no module: the pattern is all there is to verify."""

_NEAR_CHARS = 60
_CARD_PREFIX = re.compile(r"3[0-9]|4|5[0-9]|6[0-9]|2[2-7]|1\d{3}")
_PHONE_WORDS = re.compile(
    r"(?i)\b(?:tel|phone|mobile|cell|call|fax|contact|whatsapp|handy|telefon|téléphone|móvil|電話)"
)


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Detection of personal data and secrets."""

    replace: tuple[str, ...] = KINDS
    """Kinds of values that are replaced: email, phone, ip, card, iban, national_id, credentials and secret."""
    phone_regions: tuple[str, ...] = ("US", "GB", "DE", "FR", "ES", "IT", "CN", "JP", "IN", "BR")
    """Countries (ISO 3166) whose national phone numbers are recognized; international ones (`+49 ...`) always are."""

    def __post_init__(self) -> None:
        for kind in self.replace:
            if kind not in KINDS:
                raise ConfigError(f"replace: {kind!r} is not one of {', '.join(KINDS)}")
        for region in self.phone_regions:
            if region not in phonenumbers.SUPPORTED_REGIONS:
                raise ConfigError(f"phone_regions: {region!r} is not a country code such as DE")


@dataclass(frozen=True)
class Finding:
    """A value in a text: its kind, where it is, and a canonical form by which equal values are recognized."""

    kind: str
    start: int
    end: int
    value: str = field(repr=False)


@dataclass(frozen=True)
class Privacy:
    config: PrivacyConfig
    failures: Counter[str] = field(default_factory=Counter)
    """How often each validator raised an exception instead of an answer; the value in question was left as it is."""
    name: str = "privacy"

    def __call__(self, document: Document) -> tuple[Document, Counter[str]]:
        """The document with markers in place of values, and the number of values replaced by kind."""
        if not self.config.replace or not _MAYBE.search(document.text):
            return document, Counter()
        replacer = _Replacer(self.config, self.failures)
        changed = document.map_text(replacer)
        if not replacer.markers:
            return document, Counter()
        turns = [*document.messages, *document.meta.get("rejected", ())] if document.kind == "qa" else []
        parts = [turn["content"] for turn in turns] if turns else [document.text]
        return changed, sum((replacer.counts[part] for part in parts), Counter[str]())


class _Replacer:
    """Replaces values in the texts of one document."""

    def __init__(self, config: PrivacyConfig, failures: Counter[str]) -> None:
        self._config = config
        self._failures = failures
        self.markers: dict[tuple[str, str], str] = {}
        self._numbers: Counter[str] = Counter()
        self.counts: dict[str, Counter[str]] = {}

    def __call__(self, text: str) -> str:
        findings = find(text, self._config, self._failures)
        self.counts[text] = Counter(finding.kind for finding in findings)
        parts, at = [], 0
        for finding in findings:
            key = (finding.kind, finding.value)
            if key not in self.markers:
                self._numbers[finding.kind] += 1
                self.markers[key] = f"<{_MARKERS[finding.kind]}_{self._numbers[finding.kind]}>"
            parts += [text[at : finding.start], self.markers[key]]
            at = finding.end
        return "".join([*parts, text[at:]])


def find(text: str, config: PrivacyConfig, failures: Counter[str]) -> list[Finding]:
    """The values in a text, in order and without overlaps; of overlapping ones the kind that is searched for first.

    failures: counts the validators that raised, by name.
    """
    result: list[Finding] = []
    taken = bytearray(len(text))
    for kind, search in _SEARCHES.items():
        if kind not in config.replace:
            continue
        for start, end, value in search(text, config, failures):
            if not any(taken[start:end]):
                taken[start:end] = b"\x01" * (end - start)
                result.append(Finding(kind, start, end, value))
    return sorted(result, key=lambda finding: finding.start)


_Found = Iterator[tuple[int, int, str]]


def _secrets(text: str, config: PrivacyConfig, failures: Counter[str]) -> _Found:
    for match in _SECRET.finditer(text):
        yield match.start(), match.end(), match.group()
    for match in _ASSIGNED_SECRET.finditer(text):
        value = match.group(1)
        if any(map(str.isdigit, value)) and any(map(str.isalpha, value)) and len(set(value)) >= 8:
            yield match.start(1), match.end(1), value


def _credentials(text: str, config: PrivacyConfig, failures: Counter[str]) -> _Found:
    for match in _CREDENTIALS.finditer(text):
        yield match.start(2), match.end(2), match.group(2)


def _emails(text: str, config: PrivacyConfig, failures: Counter[str]) -> _Found:
    for match in _EMAIL.finditer(text):
        yield match.start(), match.end(), match.group().lower()


def _ibans(text: str, config: PrivacyConfig, failures: Counter[str]) -> _Found:
    for match in _IBAN.finditer(text):
        words = match.group().split(" ")
        for count in range(len(words), 0, -1):  # a capitalized word may follow the number
            candidate = " ".join(words[:count])
            if len(candidate) >= 15 and _is_valid("iban", candidate, failures):
                yield match.start(), match.start() + len(candidate), candidate.replace(" ", "")
                break


def _cards(text: str, config: PrivacyConfig, failures: Counter[str]) -> _Found:
    for match in _CARD.finditer(text):
        digits = re.sub(r"\D", "", match.group())
        if 12 <= len(digits) <= 19 and _CARD_PREFIX.match(digits) and _is_luhn(digits) and len(set(digits)) > 1:
            yield match.start(), match.end(), digits


def _national_ids(text: str, config: PrivacyConfig, failures: Counter[str]) -> _Found:
    for module, (pattern, near) in _NATIONAL.items():
        for match in pattern.finditer(text):
            context = text[max(0, match.start() - _NEAR_CHARS) : match.start()]
            if (not near or re.search(near, context, re.IGNORECASE)) and _is_valid(module, match.group(), failures):
                yield match.start(), match.end(), re.sub(r"\W", "", match.group()).upper()


def _ips(text: str, config: PrivacyConfig, failures: Counter[str]) -> _Found:
    for pattern in (_IPV4, _IPV6):
        for match in pattern.finditer(text):
            try:
                address = ipaddress.ip_address(match.group())
            except ValueError:
                continue
            if not address.is_global or address.is_multicast:
                continue  # loopback, private networks and examples in documentation name nobody
            if address.version == 4 and _looks_like_version(text, match):
                continue
            if address.version == 6 and not re.search(r"(?=[0-9A-Fa-f]*\d)[0-9A-Fa-f]{3}", match.group()):
                continue  # a::b is a name in C++
            yield match.start(), match.end(), address.compressed


def _phones(text: str, config: PrivacyConfig, failures: Counter[str]) -> _Found:
    """International numbers, and national ones of the configured regions that are written like phone numbers."""
    for window in _DIGITS.finditer(text):
        candidate = window.group()
        digits = sum(map(str.isdigit, candidate))
        if not 7 <= digits <= 15:
            continue
        is_international = candidate.lstrip("(").startswith(("+", "00"))
        named = bool(_PHONE_WORDS.search(text[max(0, window.start() - _NEAR_CHARS) : window.start()]))
        grouped = len(re.findall(r"\d+", candidate)) >= 3
        if not (is_international or named or grouped) or _is_date(candidate):
            continue
        for region in (None,) if is_international and candidate[0] == "+" else config.phone_regions:
            leniency = Leniency.VALID if is_international or named else Leniency.STRICT_GROUPING
            found = next(iter(PhoneNumberMatcher(candidate, region, leniency=leniency)), None)
            if found is not None and found.end - found.start >= 0.7 * len(candidate):
                number = phonenumbers.format_number(found.number, phonenumbers.PhoneNumberFormat.E164)
                yield window.start() + found.start, window.start() + found.end, number
                break


_SEARCHES: dict[str, Callable[[str, PrivacyConfig, Counter[str]], _Found]] = {
    "secret": _secrets, "credentials": _credentials, "email": _emails, "iban": _ibans, "card": _cards,
    "national_id": _national_ids, "ip": _ips, "phone": _phones,
}  # fmt: skip


@cache
def _validator(module: str) -> Callable[[str], bool]:
    return import_module(f"stdnum.{module}").is_valid


def _is_valid(module: str, value: str, failures: Counter[str]) -> bool:
    """Whether a module of `python-stdnum` accepts the value; one that raises is counted and accepts nothing."""
    try:
        return module in _WITHOUT_CHECK_DIGITS or _validator(module)(value)
    except Exception:  # a fault of a library on one text must not end a run over millions
        failures[module] += 1
        return False


def _is_luhn(digits: str) -> bool:
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        doubled = digit * (1 + place % 2)
        total += doubled - 9 * (doubled > 9)
    return total % 10 == 0


def _looks_like_version(text: str, match: re.Match[str]) -> bool:
    """`version 1.2.3.4`, `v1.2.3.4`, and section numbers such as 1.2.1.3."""
    before = text[max(0, match.start() - 12) : match.start()].lower()
    if re.search(r"(?:\b(?:version|ver\.?|v|release|rfc|section)|§)\s*$", before):
        return True
    return all(int(part) < 10 for part in match.group().split("."))


def _is_date(candidate: str) -> bool:
    return re.fullmatch(r"\(?\d{4}[-/.]\d{1,2}[-/.]\d{1,2}.*|\(?\d{1,2}[-/.]\d{1,2}[-/.]\d{4}.*", candidate) is not None
