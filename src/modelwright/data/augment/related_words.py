"""Finds the words of a sentence that others of WordNet can replace, so that the sentence still reads.

A word has many meanings and a program does not know which is meant. So only words are replaced that nearly always have
the same meaning, and only by such words. The new word gets the inflection of the old one. Parts of speech and
inflection come from the packages HanTa and lemminflect.

A WordNet database is the files `index.*`, `data.*` and `cntlist.rev` (wndb(5WN), cntlist(5WN)). They are mapped into
memory and searched there; only the counts are loaded.
"""

import mmap
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from modelwright.core.errors import DataError
from modelwright.data.augment.word_spans import find_words, is_english, match_case, missing_extra, spans_of_sentences

DEFAULT_FOLDER = Path("/usr/share/wordnet")
"""Where Debian's package `wordnet-base` installs the database."""
HYPERNYM = "@"

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
"""Share of a word's occurrences that its most frequent meaning must have."""
_MIN_COUNT = 3
"""Occurrences in WordNet's tagged texts that a new word must have, because rare ones read oddly, and that the main
meaning of a word with several must have, because fewer say nothing."""
_DETERMINERS = frozenset({"AT0", "DT0", "DPS", "CRD", "ORD", "POS", "DTQ"})
_INSIDE_NOUN_PHRASE = frozenset({"AJ0", "AJC", "AJS", "NN0", "NN1", "AV0"})
_GOVERNED = frozenset({"PRP", "PRF", "AVP", "TO0", "CJT", "AJ0", "DTQ"})
"""What follows a verb that depends on the verb itself: a preposition, a particle, an infinitive, a clause."""
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
"""Words with so many uses that a replacement seldom fits, words that are little but structure, and words of which
WordNet's main meaning is no longer the usual one. They neither change nor replace others."""


@dataclass(frozen=True)
class Synset:
    """A set of words with one meaning. words: in lower case, `_` for spaces; hypernyms: offsets of broader meanings."""

    offset: int
    words: tuple[str, ...]
    hypernyms: tuple[int, ...]


class WordNet:
    """The database in a folder. Raises `DataError` that says what to install if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = [f"{kind}.{part}" for kind in ("index", "data") for part in _PARTS]
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise DataError(
                f"{folder}: holds no WordNet database ({missing[0]} is missing); install one (Debian and Ubuntu: "
                "apt install wordnet-base) or give the folder of another with the setting `wordnet`"
            )
        self._files = {name: _map(folder / name) for name in names}
        self.synset = lru_cache(maxsize=100_000)(self._read_synset)
        self.senses = lru_cache(maxsize=100_000)(self._read_senses)

    def _read_senses(self, lemma: str, part: PartOfSpeech) -> tuple[int, ...]:
        """Offsets of the meanings of a lemma (lower case, `_` for spaces), most frequent first; empty if unknown."""
        line = _find(self._files[f"index.{part}"], lemma.encode())
        if not line:
            return ()
        fields = line.decode().split()
        return tuple(map(int, fields[6 + int(fields[3]) :]))

    def _read_synset(self, offset: int, part: PartOfSpeech) -> Synset:
        data = self._files[f"data.{part}"]
        fields = data[offset : data.find(b"|", offset)].decode().split()
        if not fields or fields[0] != f"{offset:08d}":
            raise DataError(f"{self.folder / f'data.{part}'}: has no entry at {offset}; install the database again")
        num_words = int(fields[3], 16)
        words = tuple(word.partition("(")[0].lower() for word in fields[4 : 4 + 2 * num_words : 2])
        pointers = fields[5 + 2 * num_words :]
        hypernyms = tuple(
            int(pointers[place + 1]) for place in range(0, len(pointers) - 3, 4) if pointers[place] == HYPERNYM
        )
        return Synset(offset, words, hypernyms)

    def counts(self, lemma: str, part: PartOfSpeech) -> tuple[int, ...]:
        """How often each meaning, in the order of `senses`, occurs in the tagged texts that come with WordNet."""
        counts = self._counts.get((lemma, part), {})
        return tuple(counts.get(number, 0) for number in range(1, len(self.senses(lemma, part)) + 1))

    def has_phrase(self, *words: str) -> bool:
        """Whether several words together are an entry, as "hot dog" and "take place"."""
        return any(self.senses("_".join(words), part) for part in _PARTS)

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


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _find(index: mmap.mmap, lemma: bytes) -> bytes:
    """The line of a sorted index that begins with a lemma, by bisection; empty if there is none."""
    low, high = 0, len(index)
    while low < high:
        middle = (low + high) // 2
        start = index.rfind(b"\n", 0, middle) + 1
        end = index.find(b"\n", start)
        end = len(index) if end < 0 else end
        line = index[start:end]
        found = line.partition(b" ")[0]
        if found == lemma:
            return line
        if found < lemma:  # the lines of the license begin with a space: an empty word, which sorts first
            low = end + 1
        else:
            high = start
    return b""


@dataclass(frozen=True)
class TaggedWord:
    """A word or a punctuation mark at characters `start` to `end`, with its tag in the CLAWS C5 tag set."""

    start: int
    end: int
    text: str
    tag: str

    @property
    def part(self) -> PartOfSpeech | None:
        """Its part of speech in WordNet; None for all others."""
        return _TAGS[self.tag][0] if self.tag in _TAGS else None

    @property
    def lemma(self) -> str:
        """The dictionary form of a word that has a `part`."""
        return _lemma(self.text.lower(), self.tag)

    def inflect(self, lemma: str) -> str:
        """Another lemma in the form of this word; "" if the dictionary has none."""
        return _inflected(lemma, self.tag)


def tag_sentences(text: str) -> list[list[TaggedWord]]:
    """The tokens of each sentence with their parts of speech."""
    sentences = []
    for sentence in spans_of_sentences(text):
        tagged = _tag(sentence.text.rstrip())
        sentences.append(
            [TaggedWord(sentence.start + start, sentence.start + end, *rest) for start, end, *rest in tagged]
        )
    return sentences


@lru_cache(maxsize=20_000)
def _tag(sentence: str) -> list[tuple[int, int, str, str]]:
    tokens = list(_TOKEN.finditer(sentence))
    if not tokens:
        return []
    tags = [tag for _, _, tag in _tagger().tag_sent([token[0] for token in tokens])]
    return [(token.start(), token.end(), token[0], tag) for token, tag in zip(tokens, tags, strict=True)]


@cache
def _tagger() -> Any:
    try:
        from HanTa.HanoverTagger import HanoverTagger
    except ImportError:
        raise missing_extra("HanTa") from None
    return HanoverTagger("morphmodel_en.pgz")  # it comes with the package


def is_countable(noun: str) -> bool:
    """Whether a noun has a plural and is never used without an article or a plural, as "chair" and unlike "milk"."""
    plurals = _lemminflect().getInflection(noun, "NNS", inflect_oov=False)
    return bool(plurals) and noun not in plurals


@lru_cache(maxsize=100_000)
def _lemma(word: str, tag: str) -> str:
    lemmas = _lemminflect().getLemma(word, upos=_TAGS[tag][1])
    return str(lemmas[0]) if lemmas else word


@lru_cache(maxsize=100_000)
def _inflected(lemma: str, tag: str) -> str:
    penn = _TAGS[tag][2]
    if penn in ("NN", "JJ", "RB", "VB", "VBP"):
        return lemma
    forms = [
        form for form in _lemminflect().getInflection(lemma, penn, inflect_oov=False) if form != lemma or penn == "VBD"
    ]
    return str(forms[0]) if forms else ""


def _lemminflect() -> Any:
    try:
        import lemminflect
    except ImportError:
        raise missing_extra("lemminflect") from None
    return lemminflect


Alternatives = Callable[[WordNet, str, PartOfSpeech], Sequence[str]]
"""Lemmas that can take the place of a lemma, best first."""


@dataclass(frozen=True)
class Replaceable:
    """A word of a text, and other words in its form and case that can take its place."""

    word: TaggedWord
    alternatives: tuple[str, ...]


@cache
def open_wordnet(folder: Path) -> WordNet:
    return WordNet(folder)


def replaceable_words(text: str, wordnet: WordNet, alternatives: Alternatives) -> Iterator[list[Replaceable]]:
    """For each sentence of an English text, the words that can be replaced; nothing for other languages."""
    if not is_english(text):
        return
    words = {(word.start, word.end) for word in find_words(text)}
    for sentence in tag_sentences(text):
        yield [
            Replaceable(word, options)
            for place, word in enumerate(sentence)
            if (word.start, word.end) in words and _may_change(sentence, place, wordnet)
            if (options := _options(word, wordnet, alternatives))
        ]


def _may_change(sentence: Sequence[TaggedWord], place: int, wordnet: WordNet) -> bool:
    word = sentence[place]
    if word.part is None or not word.text.isalpha() or len(word.text) < 3 or word.lemma in _LEFT_ALONE:
        return False
    if place and word.text != word.text.lower():  # a name, perhaps
        return False
    neighbors = [(other.text.lower(), word.text.lower()) for other in sentence[max(0, place - 1) : place]]
    neighbors += [(word.text.lower(), other.text.lower()) for other in sentence[place + 1 : place + 2]]
    lemmas = [(word.lemma, second) for first, second in neighbors if first == word.text.lower()]
    if any(
        first.isalpha() and second.isalpha() and wordnet.has_phrase(first, second)
        for first, second in neighbors + lemmas
    ):
        return False
    if word.part == "verb":
        return place + 1 == len(sentence) or sentence[place + 1].tag not in _GOVERNED
    return word.part != "noun" or word.tag == "NN2" or _has_determiner(sentence, place)


def _has_determiner(sentence: Sequence[TaggedWord], place: int) -> bool:
    """Whether the noun phrase of a noun in the singular starts with an article or the like."""
    while place and sentence[place - 1].tag in _INSIDE_NOUN_PHRASE:
        place -= 1
    return place > 0 and sentence[place - 1].tag in _DETERMINERS


def _options(word: TaggedWord, wordnet: WordNet, alternatives: Alternatives) -> tuple[str, ...]:
    assert word.part is not None
    lemma = word.lemma
    if main_sense(wordnet, lemma, word.part) is None:
        return ()
    options = []
    for other in alternatives(wordnet, lemma, word.part):
        is_abbreviation = other.startswith(lemma) or lemma.startswith(other)  # "minute" and "min"
        fits = other.isalpha() and len(other) > 2 and other not in _LEFT_ALONE and not is_abbreviation
        if fits and word.part == "noun":
            fits = is_countable(other) == is_countable(lemma)
        if fits and (form := word.inflect(other)):
            options.append(match_case(form, word.text))
    return tuple(dict.fromkeys(options))


def main_sense(wordnet: WordNet, lemma: str, part: PartOfSpeech) -> int | None:
    """The offset of the meaning that a lemma nearly always has; None if it has several frequent ones."""
    senses = wordnet.senses(lemma, part)
    if not senses:
        return None
    counts = wordnet.counts(lemma, part)
    is_clear = len(senses) == 1 or (counts[0] >= _MIN_COUNT and counts[0] > _MIN_SHARE * sum(counts))
    return senses[0] if is_clear else None


def is_common(wordnet: WordNet, lemma: str, part: PartOfSpeech) -> bool:
    return sum(wordnet.counts(lemma, part)) >= _MIN_COUNT
