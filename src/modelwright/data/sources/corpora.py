"""Corpora that a program generates: the words of `data.sources` that do not name files."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelwright.core.extensions import offered
from modelwright.core.resources import versions
from modelwright.data.document import Document, Unsplit
from modelwright.data.sources.arithmetic import arithmetic_problems
from modelwright.data.sources.digits import digit_images
from modelwright.data.sources.sentence_pairs import SENTENCE_PAIRS, sentence_pairs
from modelwright.data.sources.stdlib_corpus import machine_corpus
from modelwright.data.workers import ShardEngine

BUILTIN = "stdlib"
CORPORA_GROUP = "modelwright.corpora"
"""Entry points of other packages: each a `NamedCorpus`; the entry point's name is the word in `data.sources`."""


class ReadCorpus(Protocol):
    """Makes the documents, in a fixed order."""

    def __call__(
        self, *, fraction: float, skip: Callable[[str, str], None], engine: ShardEngine
    ) -> Iterator[Document | Unsplit]:
        """fraction: `data.stdlib_fraction`, for a corpus that has a smaller form; skip: receives the reason and the
        name of anything unreadable; engine: may compute a part of the documents in other processes.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class NamedCorpus:
    """A generated corpus."""

    read: ReadCorpus
    title: str = ""
    """Title in reports; "" for its word."""
    decided_by: Callable[[], list[str]] | None = None
    """Returns the versions of the libraries that the documents come from; a change makes a run read them again. None if
    the version of the corpus's own package alone decides them."""


CORPORA: Mapping[str, NamedCorpus] = {
    BUILTIN: NamedCorpus(
        read=machine_corpus,
        title="Python's standard library, torch and NumPy",
        decided_by=lambda: [sys.version, *versions("torch", "numpy").values()],
    ),
    "arithmetic": NamedCorpus(read=lambda **_: arithmetic_problems()),
    SENTENCE_PAIRS: NamedCorpus(read=lambda **_: sentence_pairs()),
    "digits": NamedCorpus(read=lambda **_: digit_images()),
}
"""The only list of the package's own corpora, in the order in which they are read."""


def corpus_words() -> tuple[str, ...]:
    """Returns the words that name a corpus, those of other packages included, in the order of reading."""
    return tuple(dict.fromkeys([*CORPORA, *offered(CORPORA_GROUP, NamedCorpus)]))


def without_corpora(sources: Sequence[str]) -> tuple[str, ...]:
    """Returns the sources that name files."""
    words = corpus_words()
    return tuple(source for source in sources if source not in words)


def find_corpus(word: str) -> NamedCorpus:
    """Returns the corpus of a word, importing only the package that offers it. Raises `ConfigError`."""
    return CORPORA[word] if word in CORPORA else offered(CORPORA_GROUP, NamedCorpus)[word]()
