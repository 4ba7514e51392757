"""Which word of a sentence can be replaced by which other one of WordNet, so that the sentence still reads.

A word has many meanings and a program does not know which is meant. So only words are replaced that nearly always have
the same meaning, and only by such words. The new word gets the inflection of the old one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from modelwright.data.augment.english import TaggedWord, is_countable, tag_sentences
from modelwright.data.augment.word_spans import find_words, is_english, match_case
from modelwright.data.augment.wordnet import PartOfSpeech, WordNet

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
