"""Decides which documents are changed, by which method and with which random stream.

A pure function of (seed, epoch, document id, strength): neither workers nor the order of documents matter, so augmented
training data resumes exactly. Documents that are held out are never changed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.data.augment.augmentation import Augmentation
from modelwright.data.document import Document


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Which copies are made."""

    methods: tuple[str, ...] = ("synonym_replacement", "identifier_renaming", "comment_dropping")
    """Names of methods; each document gets one of those that take its kind. docs/augmentation.md describes them."""
    strength: float = 1.0
    """Probability, in (0, 1], that a document gets a copy in a round."""
    copies: int = 1
    """Number of rounds; each draws methods and words anew."""
    seed: int = 0
    """Seed of all random choices."""
    num_workers: int = 0
    """Worker processes, each with its own copy of a method's model; 0 uses every core."""

    def __post_init__(self) -> None:
        if not 0 < self.strength <= 1:
            raise ConfigError(f"strength: {self.strength} is not in (0, 1]")
        if self.copies < 1:
            raise ConfigError(f"copies: must be at least 1, got {self.copies}")
        if self.num_workers < 0:
            raise ConfigError(f"num_workers: must not be negative, got {self.num_workers}; 0 uses every core")


@dataclass
class MethodCost:
    """What a method was given, what it changed and how long it took."""

    num_documents: int = 0
    num_changed: int = 0
    seconds: float = 0.0

    @property
    def documents_per_s(self) -> float:
        return self.num_documents / self.seconds if self.seconds else 0.0

    def add(self, other: "MethodCost") -> None:
        self.num_documents += other.num_documents
        self.num_changed += other.num_changed
        self.seconds += other.seconds


class Augmenter:
    """Makes changed copies of documents. `costs` adds up what each method took."""

    def __init__(self, methods: Sequence[Augmentation], *, seed: int) -> None:
        if not methods:
            raise ConfigError("methods: is empty; name at least one method of augmentation")
        self.methods = tuple(methods)
        self.seed = seed
        self.costs = {method.name: MethodCost() for method in methods}

    def __call__(self, documents: Sequence[Document], *, epoch: int, strength: float) -> list[Document | None]:
        """A changed copy of each document that is augmented in this epoch, None for the others.

        strength: the probability, in [0, 1], that a training document is augmented. Each method changes a fraction of
        a document's words, so the expected share of changed words is the product of both. Documents that are chosen at
        one strength are also chosen at every higher one. The copy has an id of its own; `meta` says what it is a copy
        of and by which method.
        """
        if not 0 <= strength <= 1:
            raise ConfigError(f"strength: {strength} is not between 0 and 1")
        chosen = [self._choose(document, epoch, strength) for document in documents]
        copies: list[Document | None] = [None] * len(documents)
        for method in self.methods:
            places = [place for place, name in enumerate(chosen) if name == method.name]
            for place, copy in zip(
                places, self._apply(method, [documents[place] for place in places], epoch), strict=True
            ):
                copies[place] = copy
        return copies

    def _choose(self, document: Document, epoch: int, strength: float) -> str:
        """The name of the method for a document; "" if it stays as it is."""
        if document.split != "train":
            return ""
        rng = Random(derive_seed(self.seed, "augment", epoch, document.id))
        is_chosen = rng.random() < strength
        names = [method.name for method in self.methods if document.kind in method.kinds]
        return rng.choice(names) if is_chosen and names else ""

    def _apply(self, method: Augmentation, documents: Sequence[Document], epoch: int) -> list[Document | None]:
        if not documents:
            return []
        seeds = [derive_seed(self.seed, "augment", epoch, document.id, method.name) for document in documents]
        start = time.perf_counter()
        changed = method.change(documents, [Random(seed) for seed in seeds])
        cost = MethodCost(len(documents), sum(copy is not None for copy in changed), time.perf_counter() - start)
        self.costs[method.name].add(cost)
        return [copy and _labeled(copy, method.name, epoch) for copy in changed]


def _labeled(copy: Document, method: str, epoch: int) -> Document:
    meta = {**copy.meta, "augmented_from": copy.id, "augmentation": method}
    return replace(copy, id=f"{copy.id}~{method}~{epoch}", meta=meta)
