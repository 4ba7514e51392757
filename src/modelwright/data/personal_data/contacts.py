"""E-mail and IP addresses."""

import ipaddress
import re

from modelwright.data.personal_data.domains import is_top_level
from modelwright.data.personal_data.pattern import Candidate, Match, Pattern, ascii_regex, words

_LETTER = r"A-Za-z0-9\u00c0-\u024f\u0370-\u03ff\u0400-\u04ff"
_LABEL = rf"[{_LETTER}](?:[{_LETTER}\-]{{0,61}}[{_LETTER}])?"
_REPOSITORY_USERS = frozenset({"git", "hg", "svn"})
"""User names of version control servers: `git@github.com:owner/name` is an address of a repository."""

_USER_OF_URL = ascii_regex(r"://[^\s/@]*:$")
_ADDRESS = words(
    r"(?<!\.)\bips?\b|ipv[46]|\bhosts?\b|hostname|addr|adresse|\bservers?\b|\bclients?\b|\bpeer|\bping\b|\bfrom\s*$|\bdns\b|gateway|"
    r"netmask|subnet|cidr|firewall|login|logged in|connect|\bssh\b|visitor|dirección|endereço|servidor|serveur|"
    r"地址|服务器|主机|访问|登录|アドレス|サーバ|接続|ログイン|ホスト"
)
_VERSION = words(
    r"(?:\b(?:version|versions|ver|v|release|released|rel|build|rfc|sections?|sect?|chapter|clause|article|table|figure|"
    r"fig|appendix|annex|item|rule|paragraph|see|oid|firmware|driver|kernel|upgraded? to|updated? to|since|since \w+|"
    r"before|until|prior to|abschnitt|kapitel|tabelle|abbildung|versión|sección|capítulo|"
    r"chapitre|tableau|versão|seção|firefox|chrome|safari|edge|windows|linux|android|python|node|java)\b[.:]?|"
    r"§+|版本|版|章|节|第|バージョン|節|項)[\s(\[\"'v]{0,4}$"
)
"""What stands right before a version or the number of a section."""
_NAME_OF_SOFTWARE = ascii_regex(r"[A-Za-z][A-Za-z0-9]*[-_/=]v?$|[-_~=<>^]$")
_RELEASE = re.compile(
    r"\)? ?(?:unstable|stable|experimental|testing|urgency|alpha|beta|rc\d|lts|release)", re.IGNORECASE
)
_LARGE_PART, _LARGE_SUM = 32, 150
_NEAR_CHARS = 30
"""An address with small parts needs a word that is nearer than other context: versions stand near servers."""


def _email(candidate: Candidate) -> Match | None:
    """The longest part of the candidate whose domain ends in a known top-level domain."""
    local, _, domain = candidate.value.rpartition("@")
    if ".." in local or candidate.follows(_USER_OF_URL):
        return None
    labels = domain.split(".")
    while len(labels) > 1 and not is_top_level(labels[-1]):
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
        or candidate.follows(_NAME_OF_SOFTWARE)
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
