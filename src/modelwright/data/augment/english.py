"""Parts of speech and inflection of English words, from the packages HanTa and lemminflect."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from modelwright.data.augment.word_spans import missing_extra, spans_of_sentences
from modelwright.data.augment.wordnet import PartOfSpeech

_TOKEN = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d[\d.,]*|[^\w\s]")

_TAGS: Mapping[str, tuple[PartOfSpeech, str, str]] = {
    "NN1": ("noun", "NOUN", "NN"), "NN2": ("noun", "NOUN", "NNS"), "NN0": ("noun", "NOUN", "NN"),
    "VVB": ("verb", "VERB", "VBP"), "VVI": ("verb", "VERB", "VB"), "VVD": ("verb", "VERB", "VBD"),
    "VVG": ("verb", "VERB", "VBG"), "VVN": ("verb", "VERB", "VBN"), "VVZ": ("verb", "VERB", "VBZ"),
    "AJ0": ("adj", "ADJ", "JJ"), "AJC": ("adj", "ADJ", "JJR"), "AJS": ("adj", "ADJ", "JJS"),
    "AV0": ("adv", "ADV", "RB"),
}  # fmt: skip
"""WordNet's part of speech, the universal one and the tag of the Penn Treebank, by tag of the CLAWS C5 tag set."""


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
