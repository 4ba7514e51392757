"""Decontamination: drops documents that repeat a passage of an evaluation set, so that its scores mean something.

A passage is 13 words in a row, as for GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165, appendix C). The
report says which share of each evaluation set was found in the corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from modelwright.data.clean.measured_corpus import MeasuredCorpus
from modelwright.data.clean.steps.step import Columns, Decisions, Drop, Drops, StepSpec
from modelwright.data.clean.words import hash_words, split_words
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
        """`passage` [N]: the first passage of an evaluation set in each document, by its number, -1 for none;
        `passages`: all that are in the shard.
        """
        known = _passages(self.config.sources)
        first: list[int] = []
        every: list[NDArray[np.int64]] = []
        for document in documents:
            numbers = known.find(document.text)
            first.append(int(numbers[0]) if len(numbers) else _NONE)
            every.append(numbers)
        return {"passage": np.array(first, np.int64), "passages": np.unique(np.concatenate([*every, _NOTHING]))}

    def decide(self, corpus: MeasuredCorpus) -> Decisions:
        known = _passages(self.config.sources)
        passages = corpus.column("passage")
        numbers = np.flatnonzero(corpus.alive & (passages != _NONE))
        passages = passages[numbers]

        def drop(place: int) -> Drop:
            return Drop("in an evaluation set", f"{PASSAGE_WORDS} words of {known.name(int(passages[place]))}")

        hits = np.zeros(len(known.hashes), np.bool_)
        for found in corpus.parts("passages"):
            hits[found] = True
        return Decisions(drops=Drops(numbers, drop), report={"figures": known.shares_found(hits)})


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

    def find(self, text: str) -> NDArray[np.int64]:
        """The numbers of the passages in a text, in its order."""
        hashes = passage_hashes(text)
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return places[self.hashes[places] == hashes] if len(self.hashes) else _NOTHING

    def name(self, passage: int) -> str:
        return self.ids[self.owners[passage]]

    def shares_found(self, hits: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
        """By evaluation set: its documents, the share of these that the corpus has a passage of, and the share of all
        passages that it has. Documents of fewer than 13 words have no passage. hits [P]: which passages it has.
        """
        sets = np.array(self.sets)
        result: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(self.sets):
            members = np.flatnonzero(sets == name)
            own = np.isin(self.owners, members)
            num_found = len(np.unique(self.owners[own & hits]))
            result[name] = {
                "documents": len(members),
                "found": round(num_found / len(members), 4),
                "passages_found": round(float(hits[own].mean()), 4) if own.any() else 0.0,
            }
        return result


@cache
def _passages(sources: tuple[str, ...]) -> _Passages:
    """Reads the evaluation sets, once in each process."""
    config = SourceConfig(sources=sources, validation_fraction=0.0)
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
        mixed = mixed * _MULTIPLIER + values[i : i + count]
        mixed ^= mixed >> np.uint64(29)
    return mixed
