"""Numbers that name an account or a person: cards, IBANs, national identity and insurance numbers."""

import re
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Literal

from modelwright.data.clean.personal_data import pattern

# Boundaries of a number: not inside a longer one, a decimal, a date, a path or an identifier.
_BEGIN, _END = r"(?<![\w.,\-/+=#])", r"(?![\w\-/]|[.,:]\d)"

_CARD_WORDS = pattern.words(
    r"card|visa|master|amex|american express|discover|maestro|diners|jcb|unionpay|credit|debit|paid|pay|charge|carte|"
    r"karte|tarjeta|cartão|kredit|crédito|银联|信用卡|银行卡|卡号|卡|カード|支付|付款|支払|决済"
)
# Prefixes and lengths of Visa, Mastercard, American Express, Discover, JCB, Maestro, Diners Club and UnionPay (ISO/IEC
# 7812, as in braintree/credit-card-type).
_ISSUERS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"4", (13, 16, 19)),
    (r"5[1-5]|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720", (16,)),
    (r"3[47]", (15,)),
    (r"6011|64[4-9]|65", (16, 19)),
    (r"35", (16,)),
    (r"2131|1800", (15,)),
    (r"5018|5020|5038|5[678]", (12, 13, 14, 15, 16, 18, 19)),
    (r"30[0-5]|3[689]", (14,)),
    (r"62|81", (16, 17, 18, 19)),
)
# Every prefix that was ever issued, for numbers that are named cards.
_RARE_ISSUERS = re.compile(r"4|5[0-9]|6[0-9]|3\d|1800|2131|2[2-7]")
_GROUPS = re.compile(
    r"\d+|\d{4}([ \-])\d{4}\1\d{4}\1\d{1,7}|\d{4}([ \-])\d{6}\2\d{4,5}|"
    r"\d{4}([ \-])\d{4}\3\d{4}\3\d{4}\3\d{1,3}"
)


def _card(candidate: pattern.Candidate) -> pattern.Match | None:
    digits = re.sub(r"\D", "", candidate.value)
    # Luhn (ISO/IEC 7812-1): every second digit from the right is doubled, and its two digits are added.
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        doubled = digit * (1 + place % 2)
        total += doubled - 9 * (doubled > 9)
    if total % 10 or len(set(digits)) < 2 or not _GROUPS.fullmatch(candidate.value):
        return None
    if candidate.is_named(_CARD_WORDS):
        known = _RARE_ISSUERS.match(digits)
    else:
        known = any(re.match(prefix, digits) and len(digits) in lengths for prefix, lengths in _ISSUERS)
    return candidate.cut(digits) if known else None


def _iban(candidate: pattern.Candidate) -> pattern.Match | None:
    parts = candidate.value.split(" ")
    for count in range(len(parts), 0, -1):  # a capitalized word may follow the number
        value = " ".join(parts[:count])
        if len(value) >= 15 and validator("iban")(value):
            return candidate.cut(value.replace(" ", ""), end=len(value))
    return None


@cache
def validator(module: str) -> Callable[[str], bool]:
    """Loads `is_valid` of a module of `python-stdnum`."""
    return import_module(f"stdnum.{module}").is_valid


def _stdnum(module: str, candidate: pattern.Candidate) -> pattern.Match | None:
    return _compact(candidate) if validator(module)(candidate.value) else None


def _compact(candidate: pattern.Candidate) -> pattern.Match:
    return candidate.cut(re.sub(r"\W", "", candidate.value).upper())


def _rvnr(candidate: pattern.Candidate) -> pattern.Match | None:
    # German pension insurance (VKVV section 4): area, date of birth, initial, serial number, check digit.
    value = re.sub(r"\W", "", candidate.value).upper()
    digits = value[:8] + f"{ord(value[8]) - 64:02d}" + value[9:11]
    weights = (2, 1, 2, 5, 7, 1, 2, 1, 2, 1, 2, 1)
    total = sum(sum(divmod(int(digit) * weight, 10)) for digit, weight in zip(digits, weights, strict=True))
    return candidate.cut(value) if total % 10 == int(value[11]) else None


def _ssn(candidate: pattern.Candidate) -> pattern.Match | None:
    """Checks a social security number, or one of the same form for taxpayers without it (ITIN)."""
    digits = re.sub(r"\D", "", candidate.value)
    return candidate.cut(digits) if validator("us.ssn")(digits) or validator("us.itin")(digits) else None


def _birth_date_id(candidate: pattern.Candidate) -> pattern.Match | None:
    # A Chinese resident number (GB 11643): its check character and a date of birth. The list of places of
    # `python-stdnum` lacks those that were renamed.
    value = candidate.value.upper()
    weights = [2 ** (17 - place) % 11 for place in range(17)]
    total = sum(int(digit) * weight for digit, weight in zip(value, weights, strict=False))
    year, month, day = int(value[6:10]), int(value[10:12]), int(value[12:14])
    is_date = 1850 <= year <= 2100 and 1 <= month <= 12 and 1 <= day <= 31
    return candidate.cut(value) if is_date and value[17] == "10X98765432"[total % 11] else None


def _number(
    name: str, regex: str, check: Callable[[pattern.Candidate], pattern.Match | None] | None = None, *, near: str = "",
    needs: Literal["never", "in code", "always"] = "in code",
) -> pattern.Pattern:  # fmt: skip
    return pattern.Pattern(
        kind="national_id",
        name=name,
        shape=_FIVE_DIGITS,
        regex=pattern.ascii_regex(f"{_BEGIN}{regex}{_END}"),
        context=pattern.words(f"{_ID_WORDS}|{near}" if near else _ID_WORDS),
        needs_context=needs,
        unless=pattern.OTHER_NUMBER,
        check=check or partial(_stdnum, name),
    )


# Every national number has five digits with at most one character between each: codice fiscale has letters.
_FIVE_DIGITS = pattern.ascii_regex(r"\d(?:[^\n]?\d){4}")
_ID_WORDS = (
    r"\bssn\b|social security|national insurance|\bnino?\b|personal number|identity (?:card|number)|identification|"
    r"national id|\bid (?:card|number|no)|citizen|passport|tax(?:payer)? (?:id|number|no)|\btin\b|insurance number"
)
_CPF = r"\bcpf\b|cadastro|contribuinte|documento"
_SPANISH = r"\bdni\b|\bnif\b|\bnie\b|documento|identidad|identificación|extranjer"
_FRENCH = r"\bnir\b|\binsee\b|sécurité sociale|sécu\b|assuré|carte vitale"

NUMBERS: tuple[pattern.Pattern, ...] = (
    pattern.Pattern(
        kind="iban",
        name="iban",
        shape=pattern.ascii_regex(r"[A-Z]{2}\d\d"),
        regex=pattern.ascii_regex(
            r"(?<!\w)[A-Z]{2}\d{2}(?:[ \u00a0]?[A-Z0-9]{2,4}){3,8}(?:[ \u00a0]?[A-Z0-9]{1,3})?(?!\w)"
        ),
        check=_iban,
    ),
    _number("cn.ric", r"[1-9]\d{16}[\dXx]", _birth_date_id, near=r"身份证|证件|公民|居民", needs="in code"),
    pattern.Pattern(
        kind="card",
        name="card",
        shape=pattern.DIGITS,
        regex=pattern.ascii_regex(r"(?<![\w.,\-/+=#])(?<!\d )\d(?:[ \-]?\d){11,18}(?![\w\-/]|[.,:]\d| \d{3})"),
        context=_CARD_WORDS,
        needs_context="in code",
        unless=pattern.OTHER_NUMBER,
        check=_card,
    ),
    _number("us.ssn", r"\d{3}-\d{2}-\d{4}", _ssn),
    _number("us.ssn without dashes", r"\d{3} ?\d{2} ?\d{4}", _ssn, near=r"\bsocial\b|\bitin\b", needs="always"),
    _number(
        "gb.nino",
        # Prefixes that are not issued are left out (HMRC, NIM39110), but for the ZZ and T of numbers for tests.
        r"(?:(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?\d{2} ?\d{2} ?\d{2} ?[A-D]|"
        r"ZZ ?\d{2} ?\d{2} ?\d{2} ?T)",
        _compact,
    ),
    _number("de.rvnr", r"\d{2} ?\d{6} ?[A-Z] ?\d{2} ?\d", _rvnr, near=r"versicherung|rente|\brvnr\b|\bsvnr\b|sozial"),
    _number("de.idnr", r"[1-9]\d ?\d{3} ?\d{3} ?\d{3}", near=r"steuer|identifikationsnummer|idnr", needs="always"),
    _number("it.codicefiscale", r"[A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z]", needs="never"),
    _number("es.dni", r"\d{8}[ -]?[A-HJ-NP-TV-Z]", near=_SPANISH),
    _number("es.nie", r"[XYZ]-?\d{7}-?[A-HJ-NP-TV-Z]", near=_SPANISH),
    _number("fr.nir", r"[12] ?\d{2} ?\d{2} ?(?:\d{2}|2[AB]) ?\d{3} ?\d{3} ?\d{2}", near=_FRENCH),
    _number("br.cpf", r"\d{3}\.\d{3}\.\d{3}-\d{2}", near=_CPF),
    _number("br.cpf without dots", r"\d{9}-?\d{2}", partial(_stdnum, "br.cpf"), near=_CPF, needs="always"),
    _number("kr.rrn", r"\d{6}-[1-8]\d{6}"),
    _number("se.personnummer", r"\d{6}(?:\d{2})?[-+]\d{4}", near=r"personnummer|personnr|födelse", needs="always"),
    _number("fi.hetu", r"\d{6}[-+A-FU-Y]\d{3}[0-9A-FHJ-NPR-Y]", near=r"henkilötunnus|hetu|personbeteckning"),
    _number("in_.aadhaar", r"[2-9]\d{3}[ -]?\d{4}[ -]?\d{4}", near=r"aadhaar|aadhar|uidai|आधार", needs="always"),
    _number("pl.pesel", r"\d{11}", near=r"pesel", needs="always"),
    _number("nl.bsn", r"\d{9}", near=r"bsn|burgerservice|sofi", needs="always"),
    _number("jp.in_", r"\d{4}[ -]?\d{4}[ -]?\d{4}", near=r"マイナンバー|個人番号|my number", needs="always"),
    _number("be.nn", r"\d{2}\.\d{2}\.\d{2}-\d{3}\.\d{2}"),
)
"""Patterns of accounts and persons. A national number is named after the module of `python-stdnum` that checks it,
unless another check is given: British insurance numbers lack check digits, and German pension numbers a module."""
