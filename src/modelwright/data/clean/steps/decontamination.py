"""Decontamination: drops documents that repeat a passage of an evaluation set, so that its scores mean something.

A passage is 13 words in a row, as for GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165, appendix C). The
report says which share of each evaluation set was found in the corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from modelwright.data.clean.features import hash_words, split_words
from modelwright.data.clean.steps.step import Columns, Decisions, Drop, Drops, MeasuredCorpus, StepSpec
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents

PASSAGE_WORDS = 13
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NONE = -1


@dataclass(frozen=True, kw_only=True)
class DecontaminationConfig:
    """Evaluation sets that must not be in the corpus."""

    sources: tuple[str, ...] = ()
    """Files or directories with the evaluation sets, in the formats of `data.sources`; documents that repeat 13 words
    in a row of one are dropped. Empty switches the step off."""


@dataclass(frozen=True)
class Decontamination:
    config: DecontaminationConfig
    name: str = "decontamination"

    def measure(self, documents: Sequence[Document], columns: Columns) -> Columns:
        """Measures `passage` [N], the number of each document's first one or -1, and `passages` of the shard."""
        known = _passages(self.config.sources)
        first: list[int] = []
        every: list[NDArray[np.int64]] = []
        for document in documents:
            # A rejected answer is learned from, too.
            hashes = passage_hashes("\n\n".join([document.text, *(turn["content"] for turn in document.rejected)]))
            places = np.minimum(np.searchsorted(known.hashes, hashes), len(known.hashes) - 1)
            numbers = places[known.hashes[places] == hashes] if len(known.hashes) else _NOTHING
            first.append(int(numbers[0]) if len(numbers) else _NONE)
            every.append(numbers)
        return {"passage": np.array(first, np.int64), "passages": np.unique(np.concatenate([*every, _NOTHING]))}

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        """Drops the documents with a passage. The figures give for each evaluation set the number of its documents, the
        fraction of them with a passage in the corpus, and the fraction of all its passages that are in the corpus.
        Documents of fewer than 13 words do not have passages.
        """
        known = _passages(self.config.sources)
        passages = corpus.column("passage")
        numbers = np.flatnonzero(corpus.alive & (passages != _NONE))
        passages = passages[numbers]

        def drop(place: int) -> Drop:
            owner = known.ids[known.owners[int(passages[place])]]
            return Drop("in an evaluation set", f"{PASSAGE_WORDS} words of {owner}")

        hits = np.zeros(len(known.hashes), np.bool_)
        for found in corpus.parts("passages"):
            hits[found] = True
        sets, figures = np.array(known.sets), dict[str, dict[str, float]]()
        for name in dict.fromkeys(known.sets):
            members = np.flatnonzero(sets == name)
            own = np.isin(known.owners, members)
            num_found = len(np.unique(known.owners[own & hits]))
            figures[name] = {
                "documents": len(members),
                "found": round(num_found / len(members), 4),
                "passages_found": round(float(hits[own].mean()), 4) if own.any() else 0.0,
            }
        return Decisions(drops=Drops(numbers, drop), report={"figures": figures})


DECONTAMINATION = StepSpec(
    name="decontamination",
    build=lambda config, seed: Decontamination(config) if config.sources else None,
    remedies={"in an evaluation set": "--clean.decontamination.sources []"},
    sources=("sources",),
)

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class _Passages:
    """The passages of D documents of evaluation sets. hashes [P]: sorted; owners [P]: the document of each."""

    ids: list[str]
    sets: list[str]
    hashes: NDArray[np.uint64]
    owners: NDArray[np.int64]


@cache
def _passages(sources: tuple[str, ...]) -> _Passages:
    """Reads the evaluation sets, once in each process."""
    config = SourceConfig(sources=sources, validation_fraction=0.0, learns=False)
    documents = list(read_documents(config, report=SourceReport()))
    rows = [passage_hashes(document.text) for document in documents]
    flat = np.concatenate([*rows, np.empty(0, np.uint64)])
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    hashes, first = np.unique(flat, return_index=True)
    return _Passages(
        ids=[document.id for document in documents],
        sets=[document.source for document in documents],
        hashes=hashes,
        owners=owners[first],
    )


def passage_hashes(text: str) -> NDArray[np.uint64]:
    """Hashes of all passages of a text, in order [max(0, words - 12)]; case, punctuation and spacing do not count."""
    values = hash_words(split_words(text))
    count = max(0, len(values) - PASSAGE_WORDS + 1)
    mixed = values[:count].copy()
    for i in range(1, PASSAGE_WORDS):
        # A polynomial hash of the words; the shift mixes high bits into the low ones, which a product leaves weak.
        mixed = mixed * _MULTIPLIER + values[i : i + count]
        mixed ^= mixed >> np.uint64(29)
    return mixed
