"""Features of a text, which the step quality sets limits on, and the hashes of its words, the same in every process.

Repetition and symbols are measured as in Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, table A1). A *data
line* is made of literals: after numbers, quoted strings, escapes and a trailing comment are removed, letters make up
less than a quarter of it. Code pages (`encodings.cp1252`), character tables and dumps consist of data lines; a model
would spend its capacity on copying them.

Further fractions from 0 to 1 are signs that a text is not prose (records, broken words, words out of order, error
pages, fragments) and signs of code. Function words are those that are frequent in any text of a language; a text in a
language that has no list here has few of them.
"""

import math
import operator
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.data.document import Document

_UNSPACED_CHARS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\u0e00-\u0eff"
_ANY_WORD = re.compile(rf"[{_UNSPACED_CHARS}]|[^\W{_UNSPACED_CHARS}]+")
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
# Bounds the memory of each worker; a cleared cache fills again within a few documents.
_MAX_CACHED = 500_000
_cache: dict[str, int] = {}


def split_words(text: str) -> list[str]:
    """Words in lower case. Characters of scripts without spaces (Chinese, Japanese, Thai) count as words."""
    pattern = _ASCII_WORD if text.isascii() else _ANY_WORD
    return pattern.findall(text.lower())


def hash_words(words: Sequence[str]) -> NDArray[np.uint64]:
    """A 64-bit hash of each word [N]."""
    if len(_cache) > _MAX_CACHED:
        _cache.clear()
    try:  # most texts have no word that none before them had
        return np.fromiter(map(_cache.__getitem__, words), np.uint64, len(words))
    except KeyError:
        # The finalizer of SplitMix64 (Steele et al. 2014) over length and CRC-32 of the word; never 0. Python's own
        # `hash` differs from process to process.
        # Not `set(words) - _cache.keys()`, which goes through the whole cache.
        for word in [word for word in set(words) if word not in _cache]:
            value = zlib.crc32(word.encode("utf-8", "replace")) + (len(word) << 32)
            value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
            _cache[word] = value ^ (value >> 31) or 1
        return np.fromiter(map(_cache.__getitem__, words), np.uint64, len(words))


# Function words by language; words that are frequent in keywords of another language (Albanian "me") are left out.
_FUNCTION_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "en": "the be to of and that have with is in it for on as at by or this not are was an from but a you if will",
        "de": "der die das und ist nicht mit von den ein eine zu auf für im sich in des dem werden wird oder als es",
        "fr": "le la les de des et est un une que qui dans pour pas sur au du en il à ne ce par avec ou",
        "es": "el los las y es en que por con para una se del no de la un a lo al como o si",
        "it": "il di che e per una non sono con da del si la un in è le i della al o",
        "pt": "o a os as um uma e de do da em que não para com por se no na",
        "nl": "de het een en van is dat niet op te zijn met voor in die of er aan",
        "sv": "och i att det som en på är av för med den till inte om ett kan",
        "da": "og i at det er en til af som på de med den ikke for et kan",
        "no": "og i det er på til som en av for at med ikke den de kan",
        "fi": "ja on ei että se oli joka mutta kun ovat myös tai niin kuin jos",
        "pl": "w i na z się nie do to że jest o jak po co dla lub jeśli",
        "cs": "a se v na je že o s z do i to jako pro není nebo pokud",
        "hu": "a az és hogy nem is egy ez van meg de volt csak vagy ha",
        "ro": "și de în a la cu pe o nu că din care este un se sau dacă",
        "tr": "ve bir bu da de için ile olarak daha çok gibi o ne veya her en sonra kadar ise olan değil ki ama",
        "hr": "i u je na se za da su s od o koji a ili ako",
        "sl": "in je v na se za da so z ki ne pa če ali",
        "id": "yang dan di dengan untuk ini dari dalam itu tidak pada ke adalah atau",
        "ca": "de la el i que a en les per un els una del no és amb",
        "vi": "và của là có cho không được một các trong người này",
        "et": "ja on ei et see oma ka kui või mis",
        "lt": "ir kad su iš į yra tai kaip ar o",
        "sk": "a na v sa je že s z do o i to ako pre alebo",
        "af": "die en van in is het nie dat te vir op wat met sy",
        "eu": "eta da ez du bat ere dira baina edo den dute",
        "cy": "y yr a i yn o ar am ei bod mae oedd wedi hyn",
        "ga": "an na agus ar i a le do ag sé bhí seo",
        "sq": "të e në dhe një për se që nga është i si",
        "sw": "na ya wa kwa ni katika la cha za kuwa hii",
        "tl": "ang ng sa na at mga ay ito para si hindi",
        "is": "og að í á er sem til við um en var það ekki",
        "gl": "a o de que e do da en un para se os as con unha",
        "eo": "la de kaj en al estas kiu por ne li mi",
        "lv": "un ir ka ar no uz par kas vai",
    }.items()
}
_LANGUAGES_OF: Mapping[str, tuple[str, ...]] = {
    word: tuple(language for language, own in _FUNCTION_WORDS.items() if word in own)
    for word in frozenset().union(*_FUNCTION_WORDS.values())
}
_LITERAL = re.compile(
    r"""[rbuRBU]{0,2}"(?:[^"\\]|\\.)*"|[rbuRBU]{0,2}'(?:[^'\\]|\\.)*'|\b0[xX][0-9a-fA-F]+\b|[-+]?\b\d[\w.]*"""
)
_MAY_BE_DATA = re.compile(r"""['"\d]""")
_COMMENT = re.compile(r"\s*(#|//).*$")
_DIGIT = re.compile(r"\d")
_SYMBOL = re.compile(r"[^\w\s.,;:!?'\"()\-\u2010-\u201f\u3001-\u3003\uff0c\uff1a\uff1b\uff01\uff1f]")
_CUT_OFF = re.compile(r"\w\s*(?:\.\.\.|\u2026|\.{0,3}\s*\[?(?:read|show) more\W*)$", re.IGNORECASE)
_LATIN = re.compile(r"[A-Za-zÀ-ɏ]")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")
_ASCII_OTHERS = bytes(code for code in range(128) if not chr(code).isalpha())
_ASCII = [chr(code) for code in range(128)]
_ASCII_DIGITS = [code for code, char in enumerate(_ASCII) if _DIGIT.match(char)]
_ASCII_SYMBOLS = [code for code, char in enumerate(_ASCII) if _SYMBOL.match(char)]
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MAX_NGRAM = 4
# zlib looks back 32 KiB at most: more text would take time and tell little more.
_COMPRESSED_CHARS = 20_000
MIN_LINES = 8
"""Repeated lines and lines of data are not judged in shorter documents."""
_FEWEST_LINES_OF_CODE = 4
# Number of characters at the start of a text from which its features are computed.
_HEAD_CHARS = 200_000
FEATURES = (
    "num_chars", "num_words", "mean_word_chars", "char_entropy", "word_entropy", "digit_fraction", "symbol_fraction",
    "duplicate_line_fraction", "data_fraction", "top_ngram_fraction", "compression_ratio", "stop_word_fraction",
    "ellipsis_fraction", "misordered_fraction", "sorted_fraction", "broken_word_fraction", "record_fraction",
    "error_fraction", "cut_end_fraction", "code_fraction",
)  # fmt: skip
"""num_chars: of the text without its title, for pairs of the answers; num_words: of the whole text. Entropies in bits.
duplicate_line_fraction, data_fraction: of characters, in lines that occurred before and in lines of data, 0 below
`MIN_LINES` lines. top_ngram_fraction: largest fraction of characters that one 2- to 4-gram of words covers.
compression_ratio: compressed over uncompressed bytes (zlib). stop_word_fraction: of the words in Latin script, those
that are frequent in one language, 1 where there are few words in Latin script. ellipsis_fraction: of the lines, those
that end where the text was cut off (an ellipsis, "Read more"). The others: see `measure` and its functions."""
# Words by language after which a noun phrase must continue, with the words that cannot continue it.
_MISORDERED: Mapping[str, tuple[tuple[frozenset[str], frozenset[str]], ...]] = {
    language: tuple((frozenset(before.split()), frozenset(after.split())) for before, after in pairs)
    for language, pairs in {
        "en": (
            (
                "the a an",
                "the a an of to in for on at by from with and or but that is are was were be has have it if this",
            ),
            ("of", "of to for on at from with and or but is are was were be has have if"),
        ),
        "de": (
            (
                "ein eine einen einem einer eines vom zum zur im",
                "und oder ist sind mit zu auf für im in nicht wird ein eine aber wenn dass als das",
            ),
        ),
        "fr": (
            ("le les un une des du au", "le la les et ou est sont dans sur pour par avec du des un une qui que au"),
        ),
        "es": (("un una el los las del al", "el los las y o es son en por para con un una del al"),),
    }.items()
}
_STARTS = {language: frozenset[str]().union(*(starts for starts, _ in of)) for language, of in _MISORDERED.items()}
_FEWEST_PAIRS = 5
_BROKEN_WORD = re.compile(r"[a-zà-öø-ÿ][\d!]+[a-zà-öø-ÿ]")
_SPACES = re.compile(r"[\s,;|]+")
_FEWEST_TOKENS_WITH_DIGITS = 3
_SHARE_OF_TOKENS_WITH_DIGITS = 0.35
_CODE_LINE = re.compile(
    r"""\s*(?:
    (?:async\ )?(?:def|class|func|fn|struct|enum|interface|namespace|using)\ .*
    |(?:public|private|protected|static|const|let|var)\ .*
    |(?:import\ [\w.*{]|from\ [\w.]+\ import\b|\#\s?(?:include|define|ifdef|ifndef|endif)\b|package\ [\w.]+;?$).*
    |(?:if|elif|for|while|with|except|switch|catch)\b.*[:{]|(?:else|try|finally)\s?[:{]
    |(?:return|raise|yield|assert|del)\b.*
    |(?:self|this)[.\->].*|@\w[\w.]*(?:\(.*\))?|pass|break|continue|\}.*|["']{3}.*
    |[\w.\[\]"'*&]+\s*(?:[-+*/|&%]|:\ ?[\w\[\], .]+)?=[^=].*
    |[\w.]+\([^)]*\)?[,;:]?|.*(?:[;{}\[]|\w\(|\),?|=>|->)
    )\s*""",
    re.VERBOSE,
)
_ERRORS = sorted(status.phrase for status in HTTPStatus if status >= 400)
_STATUS = re.compile(r"[45]\d\d")
_ERROR_LINE = re.compile(
    rf"\W*(?:http\W+)?(?:error\W+)?(?:[45]\d\d\W+(?:{'|'.join(map(re.escape, _ERRORS))})|(?:http|error)\W+[45]\d\d)\b"
    r".{0,40}",
    re.IGNORECASE,
)
# What error pages say of themselves, in the words of servers, proxies and browsers.
_ERROR_SIGN = re.compile(
    r"(?i:requested (?:url|page|resource)|was not found on (?:this|the) server|check your spelling|try again later|"
    r"access (?:is )?denied|page (?:can(?:no|')?t be|was not|not|could not be) found|nothing was found at this|"
    r"site can.?t be reached|took too long to respond|ray id|security service to protect|status report|error code|"
    r"nothing matches the given uri|did not find a current representation|temporarily unable to service|"
    r"unable to service your request|maintenance downtime|error response|contact the (?:web ?)?(?:site )?administrator|"
    r"seite (?:wurde )?nicht gefunden|konnte (?:leider )?nicht gefunden werden|page (?:introuvable|non trouvée)|"
    r"página no encontrada|pagina non trovata|página não encontrada|pagina niet gevonden|страница не найдена|"
    r"nie znaleziono strony|stránka nenalezena|sidan (?:kunde inte hittas|hittades inte)|zur startseite)|"
    r"ERR_[A-Z_]{6,}|페이지를 찾을 수 없|ページが見つかりません|找不到(?:该)?页面|页面不存在|页面未找到|"
    r"^(?:HTTP Status |Error |Fehler )?[45]\d\d\b|^(?:nginx|openresty|Apache|cloudflare)(?:/[\d.]+)?",
    re.MULTILINE,
)
# Each match has one of these in lower case. To look for them takes a tenth of the pattern's time.
_PARTS_OF_ERROR_SIGNS = (
    "requested ", "r spelling", "try again later", "denied", "t be found", "not found", "was found at", "t be reached",
    "took too long", "ray id", "security service", "status report", "error code", "nothing matches", "find a current",
    "unable to service", "downtime", "error response", "administrator", "nicht gefunden", "page introuvable", "non tro",
    "encontrada", "niet gevonden", "nie znaleziono", "inte hitta", "hittades", "startseite", "err_", "nginx",
    "openresty", "apache", "cloudflare",
)  # fmt: skip
_FURTHER_PARTS_OF_ERROR_SIGNS = (
    "не найдена", "nenalezena", "페이지를 찾을 수 없", "ページが見つかりません", "找不到", "页面不存在", "页面未找到",
)  # fmt: skip
"""Those that only a text with other characters than ASCII can have."""
_MOST_WORDS_OF_ERROR = 150
_ERROR_PHRASES = frozenset(phrase.lower() for phrase in _ERRORS)
_SPEAKER = re.compile(
    r"\s*(?:[\[(]?\d{1,2}:\d\d(?::\d\d)?[\])]?\s*(?:- )?)?"
    r"(<[^<>\s]{1,24}>|\**[^\W\d][\w .'-]{0,24}(?:\**:\**(?=\s)|> ))|"
    r"([^\W\d][\w .'-]{0,24}) \(\d{1,2}:\d\d(?::\d\d)?\)\s*$"
)
_CELLS = re.compile(r"\||\t|;|,(?! )| {2,}(?=\S)")
_FEWEST_ROWS, _LAYOUT_CHARS = 4, 4000
Layout = Literal["chat", "table", "text"]
# Texts of fewer words may have no word twice.
_FEWEST_WORDS_OF_CUT, _FEWEST_WORDS_OF_SCAN = 4, 30
_FEWEST_WORDS_OF_LIST, _SHARE_OF_DISTINCT_WORDS = 60, 0.97
# What bad scans read: a letter, or two, in place of others.
_CONFUSIONS = (
    ("h", "b"), ("e", "c"), ("rn", "m"), ("m", "rn"), ("cl", "d"), ("d", "cl"), ("l", "1"), ("i", "l"),
    ("o", "0"), ("u", "ii"), ("w", "vv"), ("s", "5"), ("i", "1"), ("c", "e"),
)  # fmt: skip
# In others too many confusions are words themselves.
_LANGUAGES_OF_SCANS = ("en", "de", "fr", "es", "it", "pt", "nl")
_REAL_WORDS = frozenset(
    ("arc", "bad", "eon", "bat", "bet", "bis", "bot", "cst", "dic", "fie", "ist", "1st", "fat", "fit", "foo")
)
"""Confusions that are words themselves."""
_ENDS = frozenset(".!?:;…\"'”’»)]}>。!?】」』*`|")
_CUT_START = re.compile(r"[a-zà-öø-ÿ,;.)\]}](?!\.\.)")
# Two letters and the character before them: all that the pattern sees.
_PIECE, _PIECE_CHARS = re.compile(r"(?<![\w'’.\-])[a-z]{1,2}$"), 3
# The end of a word, or a quotation mark that closes.
_HEAD_PIECE = re.compile(r"[a-z]{1,2}(?=\s)|[\"'](?=[\s.,;:)])")
_SHORT_WORDS = frozenset(
    ("me", "us", "up", "so", "no", "ok", "go", "we", "he", "my", "oh", "hi", "am", "pm", "tv", "pc", "id", "vs")
)
# Chats begin with these, while words are cut before them more rarely than after.
_HEAD_WORDS = _SHORT_WORDS | {"u", "r", "im", "ur", "ah", "ye"}
_OPENED, _CLOSED = re.compile(r"(?<![:;=\-])[(\[{]"), re.compile(r"[)\]}]")


def layout_of(text: str) -> Layout:
    """Classifies the lines of a text as turns of a chat, rows of a table or anything else."""
    lines = [line for line in text[:_LAYOUT_CHARS].split("\n") if line.strip()]
    if len(lines) < _FEWEST_ROWS:
        return "text"
    speakers = [match[1] or match[2] for line in lines if (match := _SPEAKER.match(line))]
    if len(speakers) >= 0.5 * len(lines) and len(set(speakers)) <= 0.5 * len(speakers):
        return "chat"
    cells = Counter(len(_CELLS.findall(line)) for line in lines)
    return "table" if sum(count for number, count in cells.items() if number >= 2) >= 0.6 * len(lines) else "text"


def measure(document: Document) -> list[float]:
    """The features of a document, in the order of `FEATURES`."""
    whole, body = document.text, document.body
    text = whole[:_HEAD_CHARS]
    lines = [line for line in text.split("\n") if line.strip()]
    has_lines = len(lines) >= MIN_LINES
    words = split_words(text)
    num_chars, num_words = max(1, len(text)), len(words)
    if len(text) < len(whole):
        num_words = num_words * len(whole) // num_chars
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    if text.isascii():
        counts = np.bincount(np.frombuffer(text.encode("ascii"), np.uint8), minlength=128)
        num_digits, num_symbols = int(counts[_ASCII_DIGITS].sum()), int(counts[_ASCII_SYMBOLS].sum())
        counts = counts[counts > 0]
    else:
        points = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
        counts = np.unique(points, return_counts=True)[1]
        num_digits, num_symbols = len(_DIGIT.findall(text)), len(_SYMBOL.findall(text))
    hashes = hash_words(words)
    function_words, language = function_word_share(words)
    # In Chinese and Japanese a few characters say as much as a line of the Latin commands between them.
    head = text[:1000]
    if head.isascii():
        is_latin = len(head.encode("ascii").translate(None, _ASCII_OTHERS)) >= 0.5 * len(head)
    else:
        is_latin = len(_LATIN.findall(head)) >= 0.5 * len(head) and len(_UNSPACED.findall(head)) <= 0.05 * len(head)
    raw = text[:_COMPRESSED_CHARS].encode("utf-8", "replace")
    may_be_cut_off = [line for line in lines if "..." in line or "\u2026" in line or "more" in line.lower()]
    # Pairs of different neighboring words: half are in alphabetical order in prose, all in a word list.
    num_sorted, num_pairs = (sum(map(relation, words, words[1:])) for relation in (operator.lt, operator.ne))
    # Digits or exclamation marks between the letters of a word come from bad scans.
    parts = text.split() if (num_digits or "!" in text) and _BROKEN_WORD.search(text) else []
    may_be_errors = [line for line in lines if _STATUS.search(line)]
    layout = layout_of(text)
    num_distinct = len(set(words))
    is_list = num_words >= _FEWEST_WORDS_OF_LIST and num_distinct >= _SHARE_OF_DISTINCT_WORDS * len(words)
    confused = confused_words(language)
    num_broken = sum(_BROKEN_WORD.search(part) is not None for part in parts)
    # A few of many: the others look like words. The language of a short text may be another one.
    if len(words) >= _FEWEST_WORDS_OF_SCAN and not confused.isdisjoint(words):
        num_broken += 2 * sum(word in confused for word in words)
    return [
        float(len(body) if body.strip() else 0),
        float(num_words),
        float(lengths.mean()) if len(words) else 0.0,
        _entropy(counts),
        _entropy(np.unique(hashes, return_counts=True)[1]),
        num_digits / num_chars,
        num_symbols / num_chars,
        duplicate_share(lines) if has_lines and layout != "chat" else 0.0,
        data_share(lines) if has_lines else 0.0,
        _top_ngram_share(hashes, lengths, num_chars),
        len(zlib.compress(raw, 1)) / max(1, len(raw)),
        function_words if words and is_latin and layout == "text" else 1.0,
        sum(_CUT_OFF.search(line) is not None for line in may_be_cut_off) / max(1, len(lines)),
        misordered_share(words, language),
        1.0 if is_list and is_latin and layout == "text" else num_sorted / max(1, num_pairs),
        num_broken / max(1, len(words)),
        record_share(lines) if has_lines else 0.0,
        max(
            sum(_ERROR_LINE.fullmatch(line) is not None for line in may_be_errors) / max(1, len(lines)),
            error_share(text),
        )
        if num_words <= _MOST_WORDS_OF_ERROR
        else 0.0,
        cut_end_share(body.strip(), words),
        sum(_CODE_LINE.fullmatch(line) is not None for line in lines) / len(lines)
        if len(lines) >= _FEWEST_LINES_OF_CODE
        else 0.0,
    ]


def cut_end_share(ends: str, words: Sequence[str]) -> float:
    """Returns 0.5 for one sign and 1.0 for more that a text begins or ends inside a sentence: a lower-case letter (of
    Latin script) first, no punctuation last, a piece of a word at either end, an open bracket. A text of several lines
    or few words has none.
    """
    if "\n" in ends or len(words) < _FEWEST_WORDS_OF_CUT:
        return 0.0
    num_cut = (_CUT_START.match(ends) is not None) + (ends[-1:] not in _ENDS and ends[-1:].isascii())
    if _PIECE.search(ends[-_PIECE_CHARS:]):
        num_cut += words[-1] not in _LANGUAGES_OF and words[-1] not in _SHORT_WORDS
    if piece := _HEAD_PIECE.match(ends):
        num_cut += piece[0] not in _LANGUAGES_OF and piece[0] not in _HEAD_WORDS
    if any(map(ends.__contains__, "([{")):
        num_cut += len(_OPENED.findall(ends)) > len(_CLOSED.findall(ends))
    # A line of a poem, of code or of a list may begin and end like this.
    return min(2, num_cut) / 2 if num_cut and not _CODE_LINE.fullmatch(ends) else 0.0


def error_share(text: str) -> float:
    """Fraction of characters in the lines of a text that say what error pages do; 0 with fewer than two such signs."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    signs = {match[0].lower() for match in _ERROR_SIGN.finditer(text)} if may_have_error_sign(text) else set[str]()
    signs |= {line.lower() for line in lines if line.lower().strip(" .!") in _ERROR_PHRASES}
    if len(signs) < 2:
        return 0.0
    own = [one for one in lines if _ERROR_SIGN.search(one) or one.lower().strip(" .!") in _ERROR_PHRASES]
    return sum(map(len, own)) / sum(map(len, lines))


def may_have_error_sign(text: str) -> bool:
    """Returns False only for texts in which `_ERROR_SIGN` matches nowhere."""
    parts = _PARTS_OF_ERROR_SIGNS if text.isascii() else _PARTS_OF_ERROR_SIGNS + _FURTHER_PARTS_OF_ERROR_SIGNS
    return any(map(text.lower().__contains__, parts)) or _STATUS.search(text) is not None


@cache
def confused_words(language: str) -> frozenset[str]:
    """Function words of a language as bad scans have them: "tbe" and "thc" for "the"."""
    own = _FUNCTION_WORDS[language] if language in _LANGUAGES_OF_SCANS else frozenset[str]()
    found = set[str]()
    for word in own:
        if len(word) >= 3:
            found |= {
                word[:at] + wrong + word[at + len(right) :]
                for right, wrong in _CONFUSIONS
                for at in range(len(word))
                if word.startswith(right, at)
            }
    return frozenset(found - _LANGUAGES_OF.keys() - _REAL_WORDS)


def function_word_share(words: Sequence[str]) -> tuple[float, str]:
    """The largest share of words that are function words of one language, and that language."""
    totals = dict.fromkeys(_FUNCTION_WORDS, 0)
    counts = Counter(words)
    for word in counts.keys() & _LANGUAGES_OF.keys():
        for language in _LANGUAGES_OF[word]:
            totals[language] += counts[word]
    most, language = max((total, language) for language, total in totals.items())
    return most / max(1, len(words)), language


def misordered_share(words: Sequence[str], language: str) -> float:
    """Fraction of articles and similar words that the next word cannot follow; one such slip does not count."""
    num_pairs = num_wrong = 0
    any_start = _STARTS.get(language, frozenset())
    pairs = [pair for pair in pairwise(words) if pair[0] in any_start]
    for starts, followers in _MISORDERED.get(language, ()):
        after_start = [after for before, after in pairs if before in starts]
        num_pairs += len(after_start)
        num_wrong += sum(after in followers for after in after_start)
    return max(0, num_wrong - 1) / num_pairs if num_pairs >= _FEWEST_PAIRS else 0.0


def record_share(lines: Sequence[str]) -> float:
    """Fraction of characters in lines of records, such as those of a log: at least three parts of such a line hold
    digits, and these are more than a third of all its parts.
    """
    num_chars = 0
    for line in lines:
        if not _DIGIT.search(line):
            continue
        tokens = [token for token in _SPACES.split(line) if token]
        with_digits = sum(_DIGIT.search(token) is not None for token in tokens)
        if with_digits >= _FEWEST_TOKENS_WITH_DIGITS and with_digits > _SHARE_OF_TOKENS_WITH_DIGITS * len(tokens):
            num_chars += len(line)
    return num_chars / max(1, sum(map(len, lines)))


def duplicate_share(lines: Sequence[str]) -> float:
    """Share of the characters that are in lines that occurred before."""
    seen: set[str] = set()
    duplicate = total = 0
    for line in lines:
        total += len(line)
        if line in seen:
            duplicate += len(line)
        seen.add(line)
    return duplicate / max(1, total)


def data_share(lines: Sequence[str]) -> float:
    """Share of the characters that are in data lines."""
    data = sum(len(line) for line in lines if is_data_line(line))
    return data / max(1, sum(map(len, lines)))


def is_data_line(line: str) -> bool:
    """True if a line holds literals and hardly anything else. A comment alone is not data."""
    if not _MAY_BE_DATA.search(line):
        return False
    code = _COMMENT.sub("", line) if "#" in line or "//" in line else line
    rest, num_literals = _LITERAL.subn("", code)
    letters = sum(map(str.isalpha, rest))
    return num_literals > 0 and letters < 0.25 * len(code.strip())


def _entropy(counts: NDArray[np.int64]) -> float:
    total = int(counts.sum())
    return float(math.log2(total) - (counts * np.log2(counts)).sum() / total) if total else 0.0


def _top_ngram_share(hashes: NDArray[np.uint64], lengths: NDArray[np.int64], num_chars: int) -> float:
    # A polynomial hash: that of n words comes from that of n - 1 and the last word's, for all places at once.
    largest, rolled, covered = 0.0, hashes, lengths
    for n in range(2, _MAX_NGRAM + 1):
        if len(hashes) < n:
            break
        rolled = rolled[:-1] * _MULTIPLIER + hashes[n - 1 :]
        covered = covered[:-1] + lengths[n - 1 :] + 1
        order = rolled.argsort(kind="stable")
        ordered = rolled[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(starts, append=len(ordered))
        repeated = counts > 1
        if not repeated.any():
            break  # a longer phrase repeats only where a shorter one does
        most = (counts[repeated] * covered[order[starts[repeated]]]).max()
        largest = max(largest, float(most) / num_chars)
    return largest
