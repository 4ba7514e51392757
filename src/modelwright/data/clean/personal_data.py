"""Patterns of personal data: e-mail and IP addresses, telephone numbers by the rules of `phonenumbers` and the ways of
writing them, and numbers that name an account or a person (cards, IBANs, national identity and insurance numbers).

Top-level domains are those of the IANA root zone (data.iana.org/TLD): all countries' and the common ones. Brands and
words that are names of files, units and methods (`zip`, `mov`, `service`) are left out on purpose; `example` (RFC 2606)
is in, because addresses of made-up people must become markers too.
"""

import ipaddress
import re
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from modelwright.data.clean.patterns import DIGITS, OTHER_NUMBER, Candidate, Match, Pattern, ascii_regex, words

if TYPE_CHECKING:
    from phonenumbers import PhoneNumber

_COUNTRIES = """
ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bw by bz ca cc cd cf
cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga gd ge gf gg
gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh ki km kn
kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw mx my mz na
nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa sb sc sd se sg sh
si sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug uk us uy uz va vc ve
vg vi vn vu wf ws ye yt za zm zw
"""
_GENERIC = """
academy aero africa agency app art asia bank berlin bio biz blog business capital care cat center city clinic cloud
club coach college com community company consulting coop dental design dev digital direct earth edu education email
energy engineering events example expert family finance foundation fun fund games global gmbh gov group guru health
house info ink institute insurance int international jobs land law legal life live london ltd management market
marketing media medical mil mobi money museum name net network news ngo nyc one online org paris partners
photography post press pro pub research school science services shop site social solutions space store studio swiss
systems team tech technology tel today tokyo tools top training travel university vip wiki work world xyz zone ελ
бел москва онлайн орг рус рф укр 中国 公司 網絡
"""
_DOMAINS = frozenset(f"{_COUNTRIES} {_GENERIC}".split())
_LETTER = r"A-Za-z0-9\u00c0-\u024f\u0370-\u03ff\u0400-\u04ff"
_LABEL = rf"[{_LETTER}](?:[{_LETTER}\-]{{0,61}}[{_LETTER}])?"
# User names of version control servers: `git@github.com:owner/name` is an address of a repository.
_REPOSITORY_USERS = frozenset({"git", "hg", "svn"})

_USER_OF_URL = ascii_regex(r"://[^\s/@]*:$")
_ADDRESS = words(
    r"(?<!\.)\bips?\b|ipv[46]|\bhosts?\b|hostname|addr|adresse|\bservers?\b|\bclients?\b|\bpeer|\bping\b|\bfrom\s*$|\bdns\b|gateway|"
    r"netmask|subnet|cidr|firewall|login|logged in|connect|\bssh\b|visitor|dirección|endereço|servidor|serveur|"
    r"地址|服务器|主机|访问|登录|アドレス|サーバ|接続|ログイン|ホスト"
)
_ASSIGNED_ADDRESS = words(r"(?:\bip|ipv4|host|hostname|addr|address|server|client|peer|gateway|dns|remote\w*)=$")
# Words right before a version or the number of a section.
_VERSION = words(
    r"(?:\b(?:version|versions|ver|v|release|released|rel|build|rfc|sections?|sect?|chapter|clause|article|table|figure|"
    r"fig|appendix|annex|item|rule|paragraph|see|oid|firmware|driver|kernel|upgraded? to|updated? to|since|since \w+|"
    r"before|until|prior to|abschnitt|kapitel|tabelle|abbildung|versión|sección|capítulo|"
    r"chapitre|tableau|versão|seção|firefox|chrome|safari|edge|windows|linux|android|python|node|java)\b[.:]?|"
    r"§+|版本|版|章|节|第|バージョン|節|項)[\s(\[\"'v]{0,4}$|"
    r"\b(?:updat|upgrad|downgrad|bump|mis[eà] à jour|aktualisier|actualiz|aggiorn|обнов)\w*(?: [^\s.:;]+){0,4} [\"'v]?$"
)
_NAME_OF_SOFTWARE = re.compile(r"[^\W\d]\w*[-_/=]v?$|[-_~=<>^]$")
_RELEASE = re.compile(
    r"\)? ?(?:unstable|stable|experimental|testing|urgency|alpha|beta|rc\d|lts|release)", re.IGNORECASE
)
_LARGE_PART, _LARGE_SUM = 32, 150
# Distance of the word that an address with small parts needs, less than for other context: servers have versions.
_NEAR_CHARS = 30
_PHONE_WORDS = words(
    r"\btel\b|telep?hon|tel[eé]f[oó]n|phone|\bmobile?\b|mobilnummer|mobiltel|\bcell\b|cellular|\bfax\b|whatsapp|\bsms\b|"
    r"(?<!recent )\bcall(?:s|ed|ing)?\b|\btext me|hotline|\bdial(?:ed|led|ing)?\b|\bring\b|\bcontact\b|handy|"
    r"reach (?:me|us|him|her|them)|anruf|\brufen|rufnummer|durchwahl|festnetz|erreich|téléphon|\btél\b|portable|"
    r"appel|joindre|numéro de|móvil|llam|llám|celular|ligue|ligar|\bfone\b|telemóvel|contato|contacto|"
    r"телефон|\bтел\b|мобил|전화|연락처|휴대|puhelin|\bpuh\b|\btlf\b|\bgsm\b|\bcep\b|komórk|mobiel|mobil\b|โทร|"
    r"điện thoại|هاتف|טלפון|τηλέφ|फ़ोन|फोन|"
    r"电话|手机|致电|拨打|联系|热线|号码|来电|短信|電話|携帯|連絡|ファックス|ケータイ|お問い合わせ|番号"
)
# Words right before a number of another kind.
_NOT_A_PHONE = words(
    r"(?:\b(?:isbn|issn|doi|rfc|pages?|pp?|vol|volume|no|nos|version|lines?|ports?|uid|gid|pid|coordinates?|"
    r"latitude|longitude|lat|lon|unicode|u\+|range|years?|seiten?|páginas?|zip|plz|postcode|account|konto|kontonummer|"
    r"iban|bic|blz|ssn|total|price|preis|prix|precio|preço|population|einwohner|id)\b|[$€£¥₹]|\bU\+|isbn-1[03]|"
    r"身份证|人口|页|ページ|邮编|〒)[\s.:：#=°º(\"'“「]*$"
)
# A number that a compound or two words name: `Kontrollnummer`, `numer kontrolny`, `file no.`.
_NAME_OF_NUMBER = words(
    r"\b(?:\w{3,}[\- ]?(?:nummer|number)|\w{3,}[\- ](?:nr|no|nº|n°)|"
    r"(?:numer|numero|número|numéro|číslo|номер)(?: (?:de|di|do|du)| d')? ?\w{4,}|"
    r"aktenzeichen|geschäftszeichen|dossier|docket|case|expediente|processo|sprawy|zaak\w*)[\s.:：#=\"']*$"
)
_CJK = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_SEPARATOR = r"(?: ?[.\-/\u2010-\u2015] ?|[ \u00a0\u202f])"
_EXTENSION = r"(?: ?(?:x|ext\.? ?|extension )\d{1,6})?"
# Forms in which people write numbers, and that little else has; area codes need not be assigned.
_NORTH_AMERICAN = re.compile(
    r"(?:(?:\+|00|011[ \-.]?)?1[ \-.]?)?"
    r"(?:\([2-9]\d\d\)[ \-.]?[2-9]\d\d[ \-.]|[2-9]\d\d(?:([\-.\u2011])[2-9]\d\d\1| [2-9]\d\d[ \-]))\d{4}"
)
_BRACKETED = re.compile(r"\(0\d{1,5}\)[ \-/]?\d{2,4}(?:[ \-/]?\d{2,4}){0,3}")
_BRAZILIAN = re.compile(r"\(?[1-9]\d\)? ?9?\d{4}-\d{4}")
_JAPANESE = re.compile(r"0\d{1,3}-\d{2,4}-\d{4}")
_CHINESE = re.compile(r"1[3-9]\d[ \-]?\d{4}[ \-]?\d{4}")
_DATE = re.compile(
    r"\(?(?:1[89]|20)\d\d[-/. ](?:0?[1-9]|1[0-2])[-/. ].*|\(?\d{1,2}[-/. ]\d{1,2}[-/. ](?:1[89]|20)\d\d(?!\d).*|"
    r"(?:1[5-9]|20)\d\d *[-\u2010-\u2015/] *(?:1[5-9]|20)\d\d.*|"
    r"\d{1,2}\D(?:1[5-9]|20)\d\d[-\u2010-\u2015/](?:1[5-9]|20)\d\d|"
    r"(?:19|20)\d{6}(?:[ \-]?\d{4,6})?|.*\b(?:19|20)\d\d-[01]\d-[0-3]\d\b.*"
)
# A decimal, thousands with spaces between them, or a table's row.
_QUANTITY = re.compile(r"\d+\.\d+|\d{1,3}(?:[ \u00a0\u202f]\d{3}){3,}|(?:\d{3,4}[ \-/]){3,}\d{3,4}")
# Forms that are not telephone numbers even after a word for one: times and quantities with a fraction, dates,
# addresses, ZIP codes, UUIDs, ISBNs, and a year with a time zone.
_OTHER_FORM = re.compile(
    r"\d{8,}\.\d+|\d+\.\d{1,3}|\d+/\d+/\d.*|(?:\d{1,3}\.){3}\d{1,3}|\d{5}-\d{4}|\d{8}(?:-\d{4})+.*|"
    r"97[89](?:[ \-]?\d){10}|(?:19|20)\d\d -\d{4}"
)
# Units right after a quantity.
_UNIT = words(
    r" ?(?:bytes?|[kmgt]i?b|bits?|ms|seconds?|km|people|users|times|rows|lines|eur|usd|dollars?|[€$¥元円人])\b"
)
_COUNTING = "01234567890123456789"
# Distance of a word for telephones after a number, and before it to outweigh `_NOT_A_PHONE`, as in "fax no.".
_CHARS_AFTER, _CHARS_DIRECT = 14, 14
# E.164 has at most fifteen digits; local numbers of fewer than seven are not told from others.
_FEWEST_DIGITS, _MOST_DIGITS = 7, 15


def _email(candidate: Candidate) -> Match | None:
    # The longest part of the candidate whose domain ends in a known top-level domain; those in Punycode all count.
    local, _, domain = candidate.value.rpartition("@")
    if ".." in local or candidate.follows(_USER_OF_URL):
        return None
    labels = domain.split(".")
    while len(labels) > 1 and not ((top := labels[-1].lower()) in _DOMAINS or top.startswith("xn--")):
        labels.pop()
    if len(labels) < 2:
        return None
    address = f"{local}@{'.'.join(labels)}"
    after = candidate.text[candidate.start + len(address) :][:2]
    if local.lower() in _REPOSITORY_USERS and after[:1] in (":", "/"):
        return None
    if re.match(r"\.\d", after) or (candidate.is_code and re.match(r"[(=\[]", after)):
        return None  # a library, name@hash.so.6, and the method of a product of matrices, x@y.to(device)
    return candidate.cut(address.lower(), end=len(address))


def _ipv4(candidate: Candidate) -> Match | None:
    parts = [int(part) for part in candidate.value.split(".")]
    address = _public_address(candidate)
    if (
        address is None
        or candidate.follows(_VERSION)
        or (candidate.follows(_NAME_OF_SOFTWARE) and not candidate.follows(_ASSIGNED_ADDRESS))
        or _RELEASE.match(candidate.after)
    ):
        return None
    if re.search(r"\d $", candidate.before) and re.match(r" [\d.]", candidate.after):
        return None  # one of many numbers, such as the path of an SVG file
    named = (
        _ADDRESS.search(candidate.before[-_NEAR_CHARS:])
        or _ADDRESS.search(candidate.after[:15])
        or (re.match(r":\d{2,5}\b|/\d\d\b", candidate.after) and max(parts) >= _LARGE_PART)
    )
    # Numbers of sections and versions are small; one random address in a hundred is so small that it needs a name.
    looks_like_one = sum(part >= _LARGE_PART for part in parts) >= 2 and sum(parts) >= _LARGE_SUM
    quoted = candidate.before[-1:] in ("'", '"', "/", "@")
    return address if named or (looks_like_one and (quoted or not candidate.is_code)) else None


def _ipv6(candidate: Candidate) -> Match | None:
    if not re.search(r"(?=[0-9A-Fa-f]*\d)[0-9A-Fa-f]{3}", candidate.value):
        return None  # a::b is a name in C++
    return _public_address(candidate)


def _public_address(candidate: Candidate) -> Match | None:
    # Loopback, private networks and examples in documentation name nobody.
    try:
        address = ipaddress.ip_address(candidate.value)
    except ValueError:
        return None
    return candidate.cut(address.compressed) if address.is_global and not address.is_multicast else None


CONTACTS: tuple[Pattern, ...] = (
    Pattern(
        kind="email",
        name="email",
        anchors=("@",),
        regex=ascii_regex(
            r"(?<![\w.+\-/@%])[A-Za-z0-9_](?:[\w.+%'\-]{0,62}[\w+%\-])?@"
            rf"(?:{_LABEL}\.)+(?:xn--[a-z0-9\-]{{2,40}}|[A-Za-z\u00c0-\u024f\u0370-\u03ff\u0400-\u04ff]{{2,24}}|"
            r"(?:中国|公司|網絡))(?![@A-Za-z0-9])"
        ),
        check=_email,
    ),
    Pattern(
        kind="ip",
        name="ipv4",
        shape=ascii_regex(r"\d\.\d{1,3}\.\d"),
        regex=ascii_regex(r"(?<![\w.\-])(?:\d{1,3}\.){3}\d{1,3}(?![\w\-]|\.\w|/\d*\.)"),
        check=_ipv4,
    ),
    Pattern(
        kind="ip",
        name="ipv6",
        shape=ascii_regex(r"[0-9A-Fa-f]{1,4}:[0-9A-Fa-f]{0,4}:"),
        regex=ascii_regex(
            r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:[0-9A-Fa-f]{1,4}|(?:\d{1,3}\.){3}\d{1,3})?(?![\w:]|\.\w)"
        ),
        check=_ipv6,
    ),
)


def _phone(candidate: Candidate) -> Match | None:
    # A bracket around the number, or one opened after it, and an extension are cut off.
    value = candidate.value
    start, end, opened = int(value[0] == "(" and ")" not in value), len(value), value.rfind("(")
    if opened > max(0, value.rfind(")")):
        end = len(value[:opened].rstrip(" "))
    value = re.split(r" ?(?:x|ext)", value[start:end])[0]
    digits = re.sub(r"\D", "", value)
    if not _FEWEST_DIGITS <= len(digits) <= _MOST_DIGITS or len(set(digits)) < 4 or digits in _COUNTING:
        return None
    is_direct = _PHONE_WORDS.search(candidate.before[-_CHARS_DIRECT:])
    if (candidate.follows(_NOT_A_PHONE) and not is_direct) or _UNIT.match(candidate.after):
        return None
    named_otherwise = _NAME_OF_NUMBER.search(candidate.before)
    if named_otherwise and not _PHONE_WORDS.search(named_otherwise[0]):
        return None
    if candidate.before[-1:] == "=" and not is_direct:
        return None
    if _DATE.fullmatch(value) or _OTHER_FORM.fullmatch(value):
        return None
    if candidate.after[:1] == ":" == candidate.before[-1:]:
        return None  # a field of a longer identifier, such as a resource name of AWS
    named = bool(_PHONE_WORDS.search(candidate.before) or _PHONE_WORDS.search(candidate.after[:_CHARS_AFTER]))
    number = _international(candidate, value, named) or _national(candidate, value, digits, named)
    if (
        number is None
        and is_direct
        and re.fullmatch(r"[\d+()][\d ()\-/]+", value)
        and not re.match(r"[ ,.]\d", candidate.after)
    ):
        number = digits  # a label right before it: of any country
    return candidate.cut(number, start=start, end=end) if number else None


def _international(candidate: Candidate, value: str, named: bool) -> str | None:
    """Reads `+49 30 901820`, or 00, 001 or 011 in place of the plus sign."""
    import phonenumbers

    prefix = re.match(r"\+|\(\+|00(?=[1-9])|011[ \-.]?(?=[1-9])", value)
    if prefix is None:
        return None
    number = _parse("+" + value[prefix.end() :].lstrip("( "), None)
    if number is None:
        return None
    num_groups = len(re.findall(r"\d+", value))
    has_plus = "+" in prefix.group()
    is_good = phonenumbers.is_valid_number(number) or (
        phonenumbers.is_possible_number(number) and (named or (has_plus and (num_groups >= 3 or not candidate.is_code)))
    )
    has_form = has_plus or num_groups >= 3 or named
    return phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164) if has_form and is_good else None


def _national(candidate: Candidate, value: str, digits: str, named: bool) -> str | None:
    """Reads a number without its country: of a form that little else has, or after a word for telephones."""
    import phonenumbers

    if candidate.is_code and not named:
        return None
    forms = {"US": _NORTH_AMERICAN, "DE": _BRACKETED, "BR": _BRAZILIAN, "JP": _JAPANESE}
    if any(region in candidate.regions and form.fullmatch(value) for region, form in forms.items()):
        written = not re.fullmatch(r"(?:\d{3} ){2}\d{4}", value)
    else:
        near = candidate.before[-20:] + candidate.after[:20]
        written = "CN" in candidate.regions and bool(_CHINESE.fullmatch(value)) and bool(_CJK.search(near))
    starts_with_zero = re.match(r"\(?0[1-9]", value) is not None and not value.startswith("0.")
    if not (named or written or starts_with_zero):
        return None
    if not named:
        # In a table or a formula, other numbers or an operator are right before or after.
        in_table = re.search(r"\d[ \t]$", candidate.before) or re.match(r"[ \t]\d|[+*/=\]]", candidate.after)
        if in_table or (not written and _QUANTITY.fullmatch(value)):
            return None
    # Without a name or a form, only the zero of the country counts, and not in a run of digits that could be anything.
    is_long_enough = len(re.findall(r"\d+", value)) > 1 or len(digits) in (10, 11)
    is_plausible = digits[0] == "0" and len(digits) >= 9 and is_long_enough
    for region in candidate.regions:
        number = _parse(value, region)
        if number is None or not phonenumbers.is_valid_number_for_region(number, region):
            continue
        if named or written or is_plausible:
            return phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)
    # After the word for it people write numbers of any area, but also quantities, years and identifiers.
    is_quantity = re.fullmatch(r"\d{1,3}(?:[., ]\d{3})+", value) or "/" in value
    return digits if written or (named and 9 <= len(digits) <= 13 and not is_quantity) else None


def _parse(value: str, region: str | None) -> "PhoneNumber | None":
    import phonenumbers

    try:
        return phonenumbers.parse(value, region)
    except phonenumbers.NumberParseException:
        return None


PHONES: tuple[Pattern, ...] = (
    Pattern(
        kind="phone",
        name="phonenumbers",
        shape=DIGITS,
        regex=ascii_regex(
            rf"(?<![\w.,/#$%<>@+\-])(?<!\d:)(?:\(?\+|\()?\d(?:(?:{_SEPARATOR}|\){_SEPARATOR}?|{_SEPARATOR}?\()?\d){{6,17}}"
            rf"(?:{_EXTENSION}(?![\w%]|[.,:]\d|-\w))"
        ),
        unless=OTHER_NUMBER,
        check=_phone,
    ),
)


# Boundaries of a number: not inside a longer one, a decimal, a date, a path or an identifier.
_BEGIN, _END = r"(?<![\w.,\-/+#])", r"(?![\w\-/]|[.,:]\d)"

_CARD_WORDS = words(
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


def _card(candidate: Candidate) -> Match | None:
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


def _iban(candidate: Candidate) -> Match | None:
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


def _stdnum(module: str, candidate: Candidate) -> Match | None:
    return _compact(candidate) if validator(module)(candidate.value) else None


def _compact(candidate: Candidate) -> Match:
    return candidate.cut(re.sub(r"\W", "", candidate.value).upper())


def _rvnr(candidate: Candidate) -> Match | None:
    # German pension insurance (VKVV section 4): area, date of birth, initial, serial number, check digit.
    value = re.sub(r"\W", "", candidate.value).upper()
    digits = value[:8] + f"{ord(value[8]) - 64:02d}" + value[9:11]
    weights = (2, 1, 2, 5, 7, 1, 2, 1, 2, 1, 2, 1)
    total = sum(sum(divmod(int(digit) * weight, 10)) for digit, weight in zip(digits, weights, strict=True))
    return candidate.cut(value) if total % 10 == int(value[11]) else None


def _rrn(candidate: Candidate) -> Match | None:
    # A Korean resident number: since October 2020 its last digits are random, so the date of birth must do.
    month, day = int(candidate.value[2:4]), int(candidate.value[4:6])
    is_date = 1 <= month <= 12 and 1 <= day <= 31
    return _compact(candidate) if is_date or candidate.is_named(words(_ID_WORDS)) else None


def _ssn(candidate: Candidate) -> Match | None:
    """Checks a social security number, or one of the same form for taxpayers without it (ITIN)."""
    digits = re.sub(r"\D", "", candidate.value)
    return candidate.cut(digits) if validator("us.ssn")(digits) or validator("us.itin")(digits) else None


def _birth_date_id(candidate: Candidate) -> Match | None:
    # A Chinese resident number (GB 11643): its check character and a date of birth. The list of places of
    # `python-stdnum` lacks those that were renamed.
    value = candidate.value.upper()
    weights = [2 ** (17 - place) % 11 for place in range(17)]
    total = sum(int(digit) * weight for digit, weight in zip(value, weights, strict=False))
    year, month, day = int(value[6:10]), int(value[10:12]), int(value[12:14])
    is_date = 1850 <= year <= 2100 and 1 <= month <= 12 and 1 <= day <= 31
    return candidate.cut(value) if is_date and value[17] == "10X98765432"[total % 11] else None


def _number(
    name: str, regex: str, check: Callable[[Candidate], Match | None] | None = None, *, near: str = "",
    needs: Literal["never", "in code", "always"] = "in code",
) -> Pattern:  # fmt: skip
    return Pattern(
        kind="national_id",
        name=name,
        shape=_FIVE_DIGITS,
        regex=ascii_regex(f"{_BEGIN}{regex}{_END}"),
        context=words(f"{_ID_WORDS}|{near}" if near else _ID_WORDS),
        needs_context=needs,
        unless=OTHER_NUMBER,
        check=check or partial(_stdnum, name),
    )


# Every national number has five digits with at most one character between each: codice fiscale has letters.
_FIVE_DIGITS = ascii_regex(r"\d(?:[^\n]?\d){4}")
_ID_WORDS = (
    r"주민등록|codice fiscale|"
    r"\bssn\b|social security|national insurance|\bnino?\b|personal number|identity (?:card|number)|identification|"
    r"national id|\bid (?:card|number|no)|citizen|passport|tax(?:payer)? (?:id|number|no)|\btin\b|insurance number"
)
_CPF = r"\bcpf\b|cadastro|contribuinte|documento"
_SPANISH = r"\bdni\b|\bnif\b|\bnie\b|documento|identidad|identificación|extranjer"
_FRENCH = r"\bnir\b|\binsee\b|sécurité sociale|sécu\b|assuré|carte vitale"

NUMBERS: tuple[Pattern, ...] = (
    Pattern(
        kind="iban",
        name="iban",
        shape=ascii_regex(r"[A-Z]{2}\d\d"),
        regex=ascii_regex(r"(?<!\w)[A-Z]{2}\d{2}(?:[ \u00a0]?[A-Z0-9]{2,4}){3,8}(?:[ \u00a0]?[A-Z0-9]{1,3})?(?!\w)"),
        check=_iban,
    ),
    _number("cn.ric", r"[1-9]\d{16}[\dXx]", _birth_date_id, near=r"身份证|证件|公民|居民"),
    Pattern(
        kind="card",
        name="card",
        shape=DIGITS,
        regex=ascii_regex(r"(?<![\w.,\-/+#])(?<!\d )\d(?:[ \-]?\d){11,18}(?![\w\-/]|[.,:]\d| \d{3})"),
        context=_CARD_WORDS,
        needs_context="in code",
        unless=OTHER_NUMBER,
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
    _number("kr.rrn", r"\d{6}-[1-8]\d{6}", _rrn),
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
