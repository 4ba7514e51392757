"""Format: repairs encodings and markup, and gives equal texts one spelling.

In this order: markup to text, broken encodings, line ends as LF, no byte order marks or control characters, Unicode
NFC, no trailing spaces, at most two blank lines in a row, and URLs as configured. Documents that were binary data are
dropped. Source code keeps its markup, its URLs and its spelling of characters. Examples for fine-tuning (questions,
answers, conversations) stay as they are, unless `clean.format.examples` is "repair".

ftfy repairs UTF-8 that was read in an encoding of the West. Before it, `repair` finds, line by line, other pairs of
encodings that lead back to text (`РџСЂРёРІРµС‚` and `оПХБЕР` to `Привет`): the line is encoded as it was read and
decoded as it was meant. A line that would lose characters on the way stays unchanged. Bytes that are valid UTF-8 nearly
prove that a line was meant as UTF-8; for other encodings the line must look wrong before, and the result must look like
a text of its script.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import ftfy
import ftfy.bad_codecs
from ftfy.badness import is_bad

from modelwright.core.config import ConfigError, constant
from modelwright.data.clean.steps.step import Drop, StepSpec
from modelwright.data.document import Document

URL_MARKER = "<URL>"
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ufeff\ufffe\uffff]")
_LINE_END = re.compile("\r\n?|[\x0c\x85\u2028\u2029]")
_TRAILING_SPACE = re.compile(r"[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{4,}")
# Soft hyphens, zero-width spaces and direction marks. Joiners (U+200C, U+200D) stay: scripts and emoji need them.
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u206a-\u206f]")
_URL = re.compile(r"\b(?:https?|ftp)://[^\s<>\"'`\]\)}]+|\bwww\.[\w-]+\.[^\s<>\"'`\]\)}]+")
_TAG = re.compile(
    r"</?(?:html|head|body|div|span|p|br|a|b|i|em|strong|ul|ol|li|table|tr|td|th|h[1-6]|script|style|img|section|"
    r"article|header|footer|nav|form|input|button|meta|link|title)\b[^<>]*>",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class FormatConfig:
    """Repair of encodings and markup, normalization of characters and white space."""

    max_control_fraction: float = constant(0.05)
    """A text with a larger fraction of control and replacement characters is dropped as binary data."""
    repair_encoding: bool = constant(True)
    """Repair text that was decoded with the wrong encoding (`cafÃ©` to `café`), except in code."""
    examples: Literal["keep", "repair"] = "keep"
    """Contents of questions, answers and conversations: `keep` leaves them as their file has them, `repair` treats them
    like documents and counts those that it changes."""
    html: Literal["to_text", "keep"] = "to_text"
    """Extract the text of prose that is marked up in HTML; web pages (`.html`) are always read as text."""
    urls: Literal["keep", "mark", "remove"] = "keep"
    """Treatment of URLs outside of code: `keep` leaves them, `mark` replaces each by `<URL>`, `remove` deletes them."""
    min_html_tags: int = constant(3)
    """Fewer tags are taken for text about HTML."""
    min_html_fraction: float = constant(0.05)
    """A smaller fraction of characters in tags is taken for text about HTML."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_control_fraction <= 1:
            raise ConfigError(f"max_control_fraction: {self.max_control_fraction} is not between 0 and 1")


@dataclass(frozen=True)
class Format:
    config: FormatConfig
    name: str = "format"
    _changed: Counter[str] = field(default_factory=Counter[str], repr=False, compare=False)

    def take_counts(self) -> Mapping[str, Mapping[str, int]]:
        counts = {"changed_examples": dict(self._changed)} if self._changed else {}
        self._changed.clear()
        return counts

    def __call__(self, document: Document) -> Document | Drop:
        if not document.has_turns:
            return self._cleaned(document)
        if self.config.examples == "repair":
            result = self._cleaned(document)
            if isinstance(result, Document) and result.learned != document.learned:
                self._changed[self.name] += 1
            return result
        share = control_share(document.text)
        if share > self.config.max_control_fraction:
            return Drop("binary data", f"{share:.1%} control characters, limit {self.config.max_control_fraction:.1%}")
        return document

    def _cleaned(self, document: Document) -> Document | Drop:
        share = control_share(document.text)
        if share > self.config.max_control_fraction and document.kind != "code":
            # UTF-8 that was read as Latin-1 is full of control characters.
            document = document.map_text(self._decoded)
            share = control_share(document.text)
        if share > self.config.max_control_fraction:
            return Drop("binary data", f"{share:.1%} control characters, limit {self.config.max_control_fraction:.1%}")
        if document.kind == "code":
            return document.map_text(normalize)
        markup = False
        if document.kind == "prose" and self.config.html == "to_text":
            text = document.text
            tags = [len(tag) for tag in _TAG.findall(text)] if "</" in text or "<br" in text.lower() else []
            is_markup = sum(tags) >= self.config.min_html_fraction * len(text)
            markup = is_markup and len(tags) >= self.config.min_html_tags
        return document.map_text(lambda text: self._repaired(text, markup))

    def _repaired(self, text: str, markup: bool) -> str:
        if markup:
            from resiliparse.extract.html2text import extract_plain_text  # pyright: ignore

            text = extract_plain_text(text, alt_texts=False, skip_elements=["nav", "footer"])
        if not text.isascii():
            text = _INVISIBLE.sub("", self._decoded(text))
        if self.config.urls != "keep":
            text = _URL.sub(URL_MARKER if self.config.urls == "mark" else "", text)
        return normalize(text)

    def _decoded(self, text: str) -> str:
        if not self.config.repair_encoding or text.isascii():
            return text
        text = repair(text)  # first, because ftfy changes parts of what it does not know
        return ftfy.fix_encoding(text) if is_bad(text) else text


FORMAT = StepSpec(
    name="format",
    build=lambda config, seed: Format(config),
    needs_clean=lambda config: ["html"] if config.html == "to_text" else [],
)


def control_share(text: str) -> float:
    """Share of the characters that are control or replacement characters."""
    if _CONTROL.search(text) is None and "\ufffd" not in text:
        return 0.0
    return (len(_CONTROL.findall(text)) + text.count("\ufffd")) / max(1, len(text))


def normalize(text: str) -> str:
    """The normal form; normalizing it again changes nothing."""
    if _LINE_END.search(text):
        text = _LINE_END.sub("\n", text)
    if _CONTROL.search(text):
        text = _CONTROL.sub("", text)
    text = unicodedata.normalize("NFC", text)
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        text = _TRAILING_SPACE.sub("", text)
    return _BLANK_LINES.sub("\n\n\n", text).strip("\n")


_SINGLE_BYTE = (
    "latin-1", "sloppy-windows-1252", "sloppy-windows-1251", "sloppy-windows-1250", "sloppy-windows-1253",
    "sloppy-windows-1254", "sloppy-windows-1256", "koi8-r", "cp866", "iso8859-5", "mac-cyrillic", "mac-roman", "cp437",
    "cp850",
)  # fmt: skip
# Encodings of texts, each with those they may have been read in; of equally good readings the first counts.
_READ_AS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("utf-8", (*_SINGLE_BYTE, "gb18030", "cp932", "big5", "cp949")),
    ("cp1251", ("latin-1", "sloppy-windows-1252", "koi8-r", "cp866", "iso8859-5", "mac-cyrillic", "mac-roman")),
    ("koi8-r", ("latin-1", "sloppy-windows-1252", "sloppy-windows-1251", "cp866", "iso8859-5", "mac-roman")),
    ("cp866", ("latin-1", "sloppy-windows-1252", "sloppy-windows-1251", "koi8-r", "cp437", "mac-roman")),
    ("iso8859-5", ("latin-1", "sloppy-windows-1252", "sloppy-windows-1251", "koi8-r")),
    ("mac-cyrillic", ("mac-roman", "sloppy-windows-1251")),
    ("cp932", ("latin-1", "sloppy-windows-1252", "gb18030")),
    ("euc_jp", ("latin-1", "sloppy-windows-1252", "gb18030", "cp932")),
    ("gb18030", ("latin-1", "sloppy-windows-1252", "sloppy-windows-1251", "big5", "cp932", "cp949")),
    ("big5", ("latin-1", "sloppy-windows-1252", "gb18030", "cp932")),
    ("cp949", ("latin-1", "sloppy-windows-1252", "gb18030")),
    ("cp1253", ("latin-1", "sloppy-windows-1252", "sloppy-windows-1251")),
    ("cp1256", ("latin-1", "sloppy-windows-1252", "sloppy-windows-1251")),
    ("cp1255", ("latin-1", "sloppy-windows-1252")),
)
assert ftfy.bad_codecs.search_function("sloppy-windows-1252") is not None
# Lines with fewer characters beyond ASCII tell too little.
_FEWEST_CHARS = 6
# Minimum for lines in a script other than Latin that were not meant as UTF-8, unless the case of a word is flipped.
# Below, names and headings decode to Chinese by chance.
_FEWEST_OF_SCRIPTS = 12
# Minimum for lines in capitals that look like a text without repair.
_FEWEST_CAPITALS = 32
# Lines with this many characters beyond ASCII are repaired though the rest of the document is right.
_CERTAIN_CHARS = 32
_JUDGED_CHARS = 4000
_REMEMBERED_CHARS = 2**16
_NOT_ASCII_RUN = re.compile("[\x80-\u02ff\u2010-\u27ff]{4,}")
# The largest share of letters that differ from all others in a line of an alphabet. In a list of letters all do.
_MOST_DIFFERENT = 0.85
# The largest share of a single letter. Lines of tables decode to rows of one.
_MOST_OF_ONE = 0.3
_USUAL_CASE = 0.8
_MOSTLY, _CLEARLY = 0.7, 1.15
# Factor on the requirements of a line before another reading of it is preferred.
_DOUBT = 0.6
_WORD = re.compile(r"[^\W\d_]{2,}")
# Characters beyond ASCII that occur in texts of any script.
_PLAIN = frozenset("«»“”„‘’‚–—…№©®°§·•€¿¡\xa0\xad")


@dataclass(frozen=True)
class _Script:
    """ranges: of its characters; frequent: characters of which a text has at least the share `fewest`; is_alphabet:
    letters repeat, and some have upper case; vowels: of which it has at least the share `fewest_vowels`.
    """

    ranges: tuple[tuple[int, int], ...]
    frequent: frozenset[str]
    fewest: float
    is_alphabet: bool = False
    vowels: frozenset[str] = frozenset()
    fewest_vowels: float = 0.0


_HAN = ((0x3000, 0x303F), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xFF00, 0xFFEF))
_SCRIPTS: Mapping[str, _Script] = {
    "Cyrillic": _Script(
        ((0x400, 0x4FF),),
        frozenset("оеаинтсрвлкмдпу"),
        0.62,
        is_alphabet=True,
        vowels=frozenset("аеиоуыэюяіє"),
        fewest_vowels=0.33,
    ),
    "Greek": _Script(
        ((0x370, 0x3FF), (0x1F00, 0x1FFF)), frozenset("αοιετνσςηρπκυμλ"), 0.75, is_alphabet=True,
        vowels=frozenset("αεηιουω"), fewest_vowels=0.42,
    ),
    "Arabic": _Script(((0x600, 0x6FF),), frozenset("الينموتربةعدفسهكی"), 0.7, is_alphabet=True),
    "Hebrew": _Script(((0x590, 0x5FF),), frozenset("יוהלאתרבשמנ"), 0.6, is_alphabet=True),
    "Japanese": _Script(((0x3040, 0x30FF), *_HAN), frozenset(map(chr, range(0x3041, 0x30FB))), 0.25),
    "Chinese": _Script(
        _HAN,
        frozenset(
            "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里"
            "用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实"
            "這個們來為國說時會對過發後裡種經麼學現當沒動還進樣開從實"
        ),
        0.12,
    ),
    "Korean": _Script(
        ((0xAC00, 0xD7A3), *_HAN),
        frozenset("이다에는의을가를하고한지도로사기리어은자나아인대시서과전정그일수있해스적부들보제것게으주라상장면"),
        0.3,
    ),
}  # fmt: skip


def repair(text: str) -> str:
    """Returns the text with the lines repaired whose encoding was mistaken."""
    if text.isascii():
        return text
    lines = text.split("\n")
    from_utf8: dict[int, str] = {}
    others: dict[int, str] = {}
    for number, line in enumerate(lines):
        if _num_judged(line) >= _FEWEST_CHARS and (right := _most_natural(line, _READ_AS[:1])):
            from_utf8[number] = right
        elif right := _meant_as_other(line):
            others[number] = right
    if others:
        # A short line of right text may look like another one by chance; most documents have one encoding.
        right_lines = (line for number, line in enumerate(lines) if number not in from_utf8 and number not in others)
        num_right = sum(len(line) for line in right_lines if not line.isascii() and _naturalness(line, _DOUBT))
        if num_right > sum(len(lines[number]) for number in others):
            others = {number: right for number, right in others.items() if _num_judged(lines[number]) >= _CERTAIN_CHARS}
    repaired = from_utf8 | others
    return "\n".join(repaired.get(number, line) for number, line in enumerate(lines))


def _num_judged(line: str) -> int:
    """Number of characters that tell something about the encoding."""
    return 0 if line.isascii() else sum(char > "\x7f" and char not in _PLAIN for char in line)


def _meant_as_other(line: str) -> str:
    """Decodes a line that was meant in an encoding other than UTF-8 and was read in another one; "" if it was not."""
    num_judged = _num_judged(line)
    if num_judged < _FEWEST_CHARS:
        return ""
    # Hangul is right: other text that was read as Korean has Chinese characters, too.
    letters = [char for char in line[:_JUDGED_CHARS] if char > "\u02ff" and char not in _PLAIN]
    if sum("\uac00" <= char <= "\ud7a3" for char in letters) >= 0.9 * max(1, len(letters)):
        return ""
    # A word is flipped if all of its letters but the first are capitals: `мОСКВА`.
    is_flipped = any(len(word) > 2 and word[0].islower() and word[1:].isupper() for word in _WORD.findall(line))
    if num_judged < _FEWEST_OF_SCRIPTS and not is_flipped and max(line) >= "\u0370":
        return ""
    before = _naturalness(line, _DOUBT)
    # Encodings of Cyrillic differ in the order of letters and in their case.
    is_certain = is_flipped or num_judged >= _FEWEST_CAPITALS
    if before and not (is_certain and _share_of_capitals(line) >= _MOSTLY):
        return ""
    best = _most_natural(line, _READ_AS[1:])
    is_lower = not before or (
        _share_of_capitals(best) <= 1 - _MOSTLY and any("\u0400" <= char <= "\u04ff" for char in best)
    )
    enough = before if is_flipped else _CLEARLY * before
    return best if best and is_lower and _naturalness(best) >= enough else ""


def _most_natural(line: str, read_as: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """Returns the decoding of a line that looks most like text, "" if none does."""
    best, most = "", 0.0
    for meant, others in read_as:
        for other in others:
            try:
                candidate = line.encode(other).decode(meant)
            except (UnicodeEncodeError, UnicodeDecodeError):
                continue
            # Only a strictly better one wins: `_READ_AS` is in the order of preference.
            if candidate != line and (naturalness := _naturalness(candidate)) > most:
                best, most = candidate, naturalness
    return best


def _naturalness(text: str, doubt: float = 1.0) -> float:
    """Measures how much a line looks like a text of one script; 0 if it does not.

    Latin script is not tested like the others: it is right unless most of its characters beyond ASCII are next to each
    other. doubt: factor on the requirements of a text; below 1, unusual text passes, too.
    """
    text = text[:_JUDGED_CHARS]
    counts = Counter(char for char in text if char > "\x7f" and char not in _PLAIN)
    total = sum(counts.values())
    if not total:
        return 0.0
    if likeness := max(_likeness(text, counts, total, name, doubt) for name in _SCRIPTS):
        return likeness
    letters = sum(count for char, count in counts.items() if "LATIN" in unicodedata.name(char, ""))
    in_runs = sum(map(len, _NOT_ASCII_RUN.findall(text)))
    return 0.5 if letters >= 0.9 * total and in_runs < 0.3 * total else 0.0


@lru_cache(maxsize=_REMEMBERED_CHARS)
def _scripts_of(char: str) -> frozenset[str]:
    return frozenset(
        name for name, script in _SCRIPTS.items() if any(a <= ord(char) <= b for a, b in script.ranges)
    )  # fmt: skip


def _likeness(text: str, counts: Counter[str], total: int, name: str, doubt: float) -> float:
    """Measures how much a line looks like a text in the script of this name."""
    script = _SCRIPTS[name]
    own = {char: count for char, count in counts.items() if name in _scripts_of(char)}
    num_own = sum(own.values())
    if num_own < 0.95 * total:
        return 0.0
    is_list = len(own) > _MOST_DIFFERENT * num_own or max(own.values()) > _MOST_OF_ONE * num_own
    if script.is_alphabet and is_list and doubt == 1:
        return 0.0
    bases = Counter[str]()
    for char, count in own.items():
        # The tables of frequent letters and vowels have no accents.
        bases[_base(char) if script.is_alphabet else char] += count
    frequent, vowels = (
        sum(bases[char] for char in chars) / num_own for chars in (script.frequent, script.vowels)
    )  # fmt: skip
    if frequent < doubt * script.fewest or vowels < doubt * script.fewest_vowels:
        return 0.0
    if script.is_alphabet:
        # Words of text are in lower case, in upper case, or have one capital at the beginning.
        words = _WORD.findall(text)
        num_usual = sum(word in (word.lower(), word.upper(), word.capitalize()) for word in words)
        if num_usual / max(1, len(words)) < doubt * _USUAL_CASE:
            return 0.0
    return frequent / script.fewest


@lru_cache(maxsize=_REMEMBERED_CHARS)
def _base(char: str) -> str:
    """The lower-case letter without accents."""
    return unicodedata.normalize("NFD", char.lower())[0]


def _share_of_capitals(text: str) -> float:
    letters = [char for char in text[:_JUDGED_CHARS] if char > "\x7f" and char.lower() != char.upper()]
    return sum(map(str.isupper, letters)) / max(1, len(letters))
