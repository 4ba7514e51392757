"""Finds the words of a sentence that other words of WordNet can replace, so that the sentence still reads.

A word has many meanings, and a program does not know which one applies. So a word is replaced only if it nearly always
has the same meaning, and only by such words. The new word gets the inflection of the old one. Parts of speech and
inflection come from the packages HanTa and lemminflect.

A WordNet database consists of the files `index.*`, `data.*` and `cntlist.rev` (wndb(5WN), cntlist(5WN)). They are
mapped into memory and searched there; only the counts are loaded.
"""

import mmap
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from modelwright.core.config import DataError
from modelwright.data.augment.augmentation import find_words, import_extra, is_english, match_case, spans_of_sentences

DEFAULT_FOLDER = Path("/usr/share/wordnet")
"""Folder of the database in Debian's package `wordnet-base`."""
HYPERNYM = "@"
"""Symbol of pointers to broader meanings in `data.*`."""

PartOfSpeech = Literal["noun", "verb", "adj", "adv"]
_PARTS: tuple[PartOfSpeech, ...] = ("noun", "verb", "adj", "adv")
_PART_OF_NUMBER: Mapping[str, PartOfSpeech] = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
_TOKEN = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d[\d.,]*|[^\w\s]")

_TAGS: Mapping[str, tuple[PartOfSpeech, str, str]] = {
    "NN1": ("noun", "NOUN", "NN"), "NN2": ("noun", "NOUN", "NNS"), "NN0": ("noun", "NOUN", "NN"),
    "VVB": ("verb", "VERB", "VBP"), "VVI": ("verb", "VERB", "VB"), "VVD": ("verb", "VERB", "VBD"),
    "VVG": ("verb", "VERB", "VBG"), "VVN": ("verb", "VERB", "VBN"), "VVZ": ("verb", "VERB", "VBZ"),
    "AJ0": ("adj", "ADJ", "JJ"), "AJC": ("adj", "ADJ", "JJR"), "AJS": ("adj", "ADJ", "JJS"),
    "AV0": ("adv", "ADV", "RB"),
}  # fmt: skip
"""WordNet's part of speech, the universal one and the tag of the Penn Treebank, by tag of the CLAWS C5 tag set."""
_MIN_SHARE = 0.6
"""Minimum share of the most frequent meaning in a word's occurrences."""
_MIN_COUNT = 3
"""Minimum occurrences in WordNet's tagged texts: of a new word, because rare ones read oddly, and of the main meaning
of a word with several, because fewer prove little."""
_DETERMINERS = frozenset({"AT0", "DT0", "DPS", "CRD", "ORD", "POS", "DTQ"})
_INSIDE_NOUN_PHRASE = frozenset({"AJ0", "AJC", "AJS", "NN0", "NN1", "AV0"})
_GOVERNED = frozenset({"PRP", "PRF", "AVP", "TO0", "CJT", "AJ0", "DTQ"})
"""Complements that depend on the verb before them: a preposition, a particle, an infinitive, a clause."""
_LEFT_ALONE = frozenset({
    "able", "about", "above", "ace", "adopt", "after", "afterward", "afterwards", "again", "all", "along", "also",
    "altogether", "always", "ask", "associate", "average", "bad", "badly", "be", "beckon", "become", "before",
    "begin", "being", "beloved", "bible", "bigger", "bring", "bullet", "call", "cardinal", "central", "christ",
    "circular", "close", "come", "content", "creator", "cross", "curse", "curved", "damn", "darned", "day", "dear",
    "die", "do", "done", "dr", "easy", "elderly", "end", "enough", "espouse", "even", "ever", "evidence",
    "existence", "feel", "few", "find", "finding", "first", "full", "further", "fuse", "get", "give", "given",
    "glue", "go", "goddam", "goddamn", "goddamned", "good", "granted", "have", "help", "hence", "here", "hold",
    "hour", "hurt", "ill", "individual", "instal", "integrity", "jesus", "just", "keep", "key", "kind", "know",
    "larger", "last", "later", "lean", "learned", "leave", "let", "likewise", "link", "look", "lord", "lot", "make",
    "man", "manifest", "manpower", "many", "mean", "men", "minute", "mix", "more", "most", "mr", "mrs", "much",
    "near", "need", "never", "new", "next", "no", "north", "northward", "not", "nothing", "now", "number", "oath",
    "older", "once", "one", "only", "other", "own", "oxygen", "papers", "part", "paste", "pay", "people", "perish",
    "person", "plan", "plant", "plenty", "presently", "pretty", "print", "procure", "program", "publish", "put",
    "race", "real", "rest", "round", "run", "same", "say", "second", "secure", "see", "seem", "selling", "set",
    "show", "single", "slug", "so", "some", "sort", "spread", "spring", "springtime", "stairs", "start", "static",
    "steps", "still", "such", "sure", "take", "tell", "then", "there", "thing", "think", "through", "time", "too",
    "total", "transverse", "try", "turn", "unity", "up", "upward", "upwards", "use", "very", "want", "wave", "way",
    "well", "wind", "woman", "works", "year", "yes", "zero",
})  # fmt: skip
"""Words with so many uses that a replacement seldom fits, function words, and words whose main meaning in WordNet is
outdated. They neither change nor replace others."""


@dataclass(frozen=True)
class Synset:
    """A set of words with one meaning. words: in lower case, `_` for spaces; hypernyms: offsets of broader meanings."""

    offset: int
    words: tuple[str, ...]
    hypernyms: tuple[int, ...]


class WordNet:
    """The database in a folder. Raises `DataError`, with the package to install, if files are missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = [f"{kind}.{part}" for kind in ("index", "data") for part in _PARTS]
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise DataError(
                f"{folder}: is not a WordNet database ({missing[0]} is missing); install one (Debian and Ubuntu: "
                "apt install wordnet-base) or give the folder of another with the setting `wordnet`"
            )
        self._files: dict[str, mmap.mmap] = {}
        for name in names:
            with open(folder / name, "rb") as file:
                self._files[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.synset = lru_cache(maxsize=100_000)(self._read_synset)
        self.senses = lru_cache(maxsize=100_000)(self._read_senses)

    def _read_senses(self, lemma: str, part: PartOfSpeech) -> tuple[int, ...]:
        """Returns the offsets of a lemma's meanings, most frequent first. lemma: lower case, `_` for spaces."""
        index, wanted = self._files[f"index.{part}"], lemma.encode()
        low, high = 0, len(index)
        while low < high:  # bisection over bytes; each step compares the line around the middle
            middle = (low + high) // 2
            start = index.rfind(b"\n", 0, middle) + 1
            end = index.find(b"\n", start)
            end = len(index) if end < 0 else end
            found = index[start:end].partition(b" ")[0]
            if found == wanted:
                fields = index[start:end].decode().split()
                return tuple(map(int, fields[6 + int(fields[3]) :]))  # after a variable number of pointer symbols
            if found < wanted:  # the lines of the license begin with a space: an empty word, which sorts first
                low = end + 1
            else:
                high = start
        return ()

    def _read_synset(self, offset: int, part: PartOfSpeech) -> Synset:
        data = self._files[f"data.{part}"]
        fields = data[offset : data.find(b"|", offset)].decode().split()
        if not fields or fields[0] != f"{offset:08d}":
            raise DataError(f"{self.folder / f'data.{part}'}: lacks the entry {offset}; install the database again")
        num_words = int(fields[3], 16)  # the only hexadecimal number of the format
        words = tuple(word.partition("(")[0].lower() for word in fields[4 : 4 + 2 * num_words : 2])
        pointers = fields[5 + 2 * num_words :]
        hypernyms = tuple(
            int(pointers[place + 1]) for place in range(0, len(pointers) - 3, 4) if pointers[place] == HYPERNYM
        )
        return Synset(offset, words, hypernyms)

    def counts(self, lemma: str, part: PartOfSpeech) -> tuple[int, ...]:
        """Returns the occurrences of each meaning, in the order of `senses`, in WordNet's tagged texts."""
        counts = self._counts.get((lemma, part), {})
        return tuple(counts.get(number, 0) for number in range(1, len(self.senses(lemma, part)) + 1))

    @cached_property
    def _counts(self) -> Mapping[tuple[str, PartOfSpeech], dict[int, int]]:
        counts: dict[tuple[str, PartOfSpeech], dict[int, int]] = defaultdict(dict)
        path = self.folder / "cntlist.rev"
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                key, number, count = line.split()
                lemma, _, rest = key.partition("%")
                counts[lemma, _PART_OF_NUMBER[rest[0]]][int(number)] = int(count)
        return counts


@dataclass(frozen=True)
class TaggedWord:
    """A word or a punctuation mark at characters `start` to `end`, with its tag in the CLAWS C5 tag set."""

    start: int
    end: int
    text: str
    tag: str

    @property
    def part(self) -> PartOfSpeech | None:
        """Part of speech in WordNet; None for all others."""
        return _TAGS[self.tag][0] if self.tag in _TAGS else None


@lru_cache(maxsize=20_000)
def _tag(sentence: str) -> list[tuple[int, int, str, str]]:
    """Returns start, end, text and tag of each token. The cache serves a document that several copies are made of."""
    tokens = list(_TOKEN.finditer(sentence))
    if not tokens:
        return []
    tags = [tag for _, _, tag in _tagger().tag_sent([token[0] for token in tokens])]
    return [(token.start(), token.end(), token[0], tag) for token, tag in zip(tokens, tags, strict=True)]


@cache
def _tagger() -> Any:
    return import_extra("HanTa.HanoverTagger").HanoverTagger("morphmodel_en.pgz")  # it comes with the package


def is_countable(noun: str) -> bool:
    """Returns True for a noun with a plural whose singular always has an article ("chair", not "milk")."""
    plurals = import_extra("lemminflect").getInflection(noun, "NNS", inflect_oov=False)
    return bool(plurals) and noun not in plurals


@lru_cache(maxsize=100_000)
def _lemma(word: str, tag: str) -> str:
    """Returns the dictionary form of a word in lower case whose tag is in `_TAGS`."""
    lemmas = import_extra("lemminflect").getLemma(word, upos=_TAGS[tag][1])
    return str(lemmas[0]) if lemmas else word


@lru_cache(maxsize=100_000)
def _inflected(lemma: str, tag: str) -> str:
    """Returns a lemma in the form that a tag says; "" if the dictionary has none."""
    penn = _TAGS[tag][2]
    if penn in ("NN", "JJ", "RB", "VB", "VBP"):
        return lemma
    forms = import_extra("lemminflect").getInflection(lemma, penn, inflect_oov=False)
    # A plural or comparative that equals the lemma reads as a mistake; a past tense may ("put").
    return str(next((form for form in forms if form != lemma or penn == "VBD"), ""))


Alternatives = Callable[[WordNet, str, PartOfSpeech], Sequence[str]]
"""Returns lemmas that can replace a lemma, best first."""


@dataclass(frozen=True)
class Replaceable:
    """A word of a text, and other words in its form and case that can replace it."""

    word: TaggedWord
    alternatives: tuple[str, ...]


open_wordnet = cache(WordNet)
"""Opens the database in a folder, once in each process."""


def replaceable_words(text: str, wordnet: WordNet, alternatives: Alternatives) -> Iterator[list[Replaceable]]:
    """Yields the words of each sentence that can be replaced; nothing for a text that is not in English."""
    if not is_english(text):
        return
    words = {(word.start, word.end) for word in find_words(text)}
    for span in spans_of_sentences(text):
        tagged = _tag(span.text.rstrip())
        sentence = [TaggedWord(span.start + start, span.start + end, *rest) for start, end, *rest in tagged]
        yield [
            Replaceable(word, options)
            for place, word in enumerate(sentence)
            if (word.start, word.end) in words and _may_change(sentence, place, wordnet)
            if (options := _options(word, wordnet, alternatives))
        ]


def _may_change(sentence: Sequence[TaggedWord], place: int, wordnet: WordNet) -> bool:
    word = sentence[place]
    lower = word.text.lower()
    if word.part is None or not word.text.isalpha() or len(word.text) < 3 or _lemma(lower, word.tag) in _LEFT_ALONE:
        return False
    if place and word.text != lower:  # a name, perhaps
        return False
    # Half of an entry such as "hot dog" or "take place" must stay; "took place" is found by the lemma.
    pairs = [(other.text.lower(), lower) for other in sentence[max(0, place - 1) : place]]
    pairs += [(lower, other.text.lower()) for other in sentence[place + 1 : place + 2]]
    pairs += [(_lemma(lower, word.tag), second) for first, second in pairs if first == lower]
    for first, second in pairs:
        if first.isalpha() and second.isalpha() and any(wordnet.senses(f"{first}_{second}", one) for one in _PARTS):
            return False
    if word.part == "verb":
        return place + 1 == len(sentence) or sentence[place + 1].tag not in _GOVERNED
    if word.part != "noun" or word.tag == "NN2":
        return True
    # A singular without a determiner is often half of a compound or of a fixed phrase ("by train").
    start = place
    while start and sentence[start - 1].tag in _INSIDE_NOUN_PHRASE:
        start -= 1
    return start > 0 and sentence[start - 1].tag in _DETERMINERS


def _options(word: TaggedWord, wordnet: WordNet, alternatives: Alternatives) -> tuple[str, ...]:
    assert word.part is not None
    lemma = _lemma(word.text.lower(), word.tag)
    if main_sense(wordnet, lemma, word.part) is None:
        return ()
    options = []
    for other in alternatives(wordnet, lemma, word.part):
        is_abbreviation = other.startswith(lemma) or lemma.startswith(other)  # "minute" and "min"
        fits = other.isalpha() and len(other) > 2 and other not in _LEFT_ALONE and not is_abbreviation
        if fits and word.part == "noun":
            fits = is_countable(other) == is_countable(lemma)
        if fits and (form := _inflected(other, word.tag)):
            options.append(match_case(form, word.text))
    return tuple(dict.fromkeys(options))


def main_sense(wordnet: WordNet, lemma: str, part: PartOfSpeech) -> int | None:
    """Returns the offset of the meaning that a lemma nearly always has; None if it has several frequent ones."""
    senses = wordnet.senses(lemma, part)
    if not senses:
        return None
    counts = wordnet.counts(lemma, part)
    is_clear = len(senses) == 1 or (counts[0] >= _MIN_COUNT and counts[0] > _MIN_SHARE * sum(counts))
    return senses[0] if is_clear else None


def is_common(wordnet: WordNet, lemma: str, part: PartOfSpeech) -> bool:
    return sum(wordnet.counts(lemma, part)) >= _MIN_COUNT
