"""E-mail and IP addresses."""

import ipaddress
import re

from modelwright.data.personal_data.pattern import Candidate, Match, Pattern, ascii_regex, words

_COUNTRY_DOMAINS = frozenset(
    "ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bw by bz ca cc cd "
    "cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga gd ge "
    "gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh "
    "ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw "
    "mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa sb "
    "sc sd se sg sh si sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug uk "
    "us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw".split()
)
_GENERIC_DOMAINS = frozenset(
    "academy aero africa agency app art asia bank berlin bio biz blog business capital care cat center city clinic club "
    "cloud coach college com community company consulting coop dental design dev digital direct earth edu education "
    "email energy engineering events example expert family finance foundation fun fund games global gmbh gov group guru "
    "health house info ink institute insurance int international jobs land law legal life live london ltd management "
    "market marketing media medical mil mobi money museum name net network news ngo nyc one online org paris partners "
    "photography post press pro pub research science school services shop site social solutions space store studio "
    "swiss systems team tech technology tel tokyo today tools top training travel university vip wiki work world xyz "
    "zone бел москва онлайн орг рус рф укр ελ 中国 公司 網絡".split()
)
"""Top-level domains of the IANA root zone (data.iana.org/TLD): all countries' and the common ones. Brands and words that
are names of files, units and methods (`zip`, `mov`, `service`) are left out on purpose; `example` (RFC 2606) stays,
because addresses of made-up people must become markers too."""

_LETTER = r"A-Za-z0-9\u00c0-\u024f\u0370-\u03ff\u0400-\u04ff"
_LABEL = rf"[{_LETTER}](?:[{_LETTER}\-]{{0,61}}[{_LETTER}])?"
_NOT_A_PERSON = frozenset({"git", "hg", "svn"})
"""User names of version control servers: `git@github.com:owner/name` is an address of a repository."""

_USER_OF_URL = ascii_regex(r"://[^\s/@]*:$")
_ADDRESS = words(
    r"\bips?\b|ipv[46]|\bhosts?\b|hostname|addr|adresse|\bservers?\b|\bclients?\b|\bpeer|\bping\b|\bfrom\s*$|\bdns\b|gateway|"
    r"netmask|subnet|cidr|firewall|login|logged in|connect|\bssh\b|visitor|dirección|endereço|servidor|serveur|"
    r"地址|服务器|主机|访问|登录|アドレス|サーバ|接続|ログイン|ホスト"
)
_VERSION = words(
    r"(?:\b(?:version|versions|ver|v|release|released|rel|build|rfc|section|sections|sect?|chapter|clause|article|table|"
    r"figure|fig|appendix|annex|item|rule|paragraph|see|oid|firmware|driver|kernel|upgraded? to|updated? to|since|since \w+|before|until|prior to|(?:in|at|of|than|sections?) v?(?=\d\.)|"
    r"abschnitt|kapitel|tabelle|abbildung|versión|sección|capítulo|version|chapitre|tableau|versão|seção|"
    r"firefox|chrome|safari|edge|windows|linux|android|python|node|java)\b[.:]?|§+|版本|版|章|节|第|バージョン|節|項)"
    r"[\s(\[\"'v]{0,4}$"
)
_NAME_OF_SOFTWARE = ascii_regex(r"[A-Za-z][A-Za-z0-9]*[-_/=]v?$|[-_~=<>^]$")
_RELEASE = re.compile(r"\)? ?(?:unstable|stable|experimental|testing|urgency|alpha|beta|rc\d|lts|release)", re.IGNORECASE)
_LARGE_PART, _LARGE_SUM = 32, 150
_NEAR_CHARS = 30
"""An address with small parts needs a word that is nearer than other context: versions stand near servers."""


def _email(candidate: Candidate) -> Match | None:
    """The longest part of the candidate whose domain ends in a known top-level domain."""
    local, _, domain = candidate.value.rpartition("@")
    if local.lower() in _NOT_A_PERSON or ".." in local or candidate.follows(_USER_OF_URL):
        return None
    labels = domain.split(".")
    while len(labels) > 1 and not _is_top_level(labels[-1]):
        labels.pop()
    if len(labels) < 2:
        return None
    address = f"{local}@{'.'.join(labels)}"
    after = candidate.text[candidate.start + len(address) :][:2]
    if re.match(r"\.\d", after) or (candidate.is_code and re.match(r"[(=\[]", after)):
        return None  # a library, name@hash.so.6, and the method of a product of matrices, x@y.to(device)
    return candidate.cut(address.lower(), end=len(address))


def _is_top_level(label: str) -> bool:
    label = label.lower()
    return label in _COUNTRY_DOMAINS or label in _GENERIC_DOMAINS or label.startswith("xn--")


def _ipv4(candidate: Candidate) -> Match | None:
    parts = [int(part) for part in candidate.value.split(".")]
    address = _public_address(candidate)
    if address is None or candidate.follows(_VERSION) or candidate.follows(_NAME_OF_SOFTWARE) or _RELEASE.match(candidate.after):
        return None
    if re.search(r"\d $", candidate.before) and re.match(r" [\d.]", candidate.after):
        return None  # one of many numbers, such as the path of an SVG file
    named = _ADDRESS.search(candidate.before[-_NEAR_CHARS:]) or _ADDRESS.search(candidate.after[:15]) or re.match(r":\d{2,5}\b|/\d\d\b", candidate.after)
    # Numbers of sections and versions are small; one random address in a hundred is so small that it needs a name.
    looks_like_one = sum(part >= _LARGE_PART for part in parts) >= 2 and sum(parts) >= _LARGE_SUM
    quoted = candidate.before[-1:] in ("'", '"', "/", "@")
    return address if named or (looks_like_one and (quoted or not candidate.is_code)) else None


def _ipv6(candidate: Candidate) -> Match | None:
    if not re.search(r"(?=[0-9A-Fa-f]*\d)[0-9A-Fa-f]{3}", candidate.value):
        return None  # a::b is a name in C++
    return _public_address(candidate)


def _public_address(candidate: Candidate) -> Match | None:
    """Loopback, private networks and examples in documentation name nobody."""
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
