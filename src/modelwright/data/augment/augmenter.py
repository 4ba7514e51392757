"""Decides which documents are changed, by which method and with which random stream.

A copy is a pure function of (seed, epoch, document id, strength): neither workers nor the order of documents matter, so
augmented training data resumes exactly. Documents that are held out are never changed.
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
    """Selection of methods and the number of copies."""

    methods: tuple[str, ...] = ("synonym_replacement", "identifier_renaming", "comment_dropping")
    """Names of methods, of which one that accepts the document's kind is drawn. docs/augmentation.md describes them."""
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
    """Number of documents that a method received and changed, and the time that it took."""

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
    """Makes changed copies of documents. `costs` adds up the cost of each method."""

    def __init__(self, methods: Sequence[Augmentation], *, seed: int) -> None:
        if not methods:
            raise ConfigError("methods: is empty; name at least one method of augmentation")
        self.methods = tuple(methods)
        self.seed = seed
        self.costs = {method.name: MethodCost() for method in methods}

    def __call__(self, documents: Sequence[Document], *, epoch: int, strength: float) -> list[Document | None]:
        """Returns a changed copy of each document that is augmented in this epoch, None for the others.

        strength: the probability, in [0, 1], that a training document is augmented. Each method changes a fraction of
        a document's words, so the expected share of changed words is the product of both. Documents that are chosen at
        one strength are also chosen at every higher one. The `meta` of a copy names its original and the method.
        """
        if not 0 <= strength <= 1:
            raise ConfigError(f"strength: {strength} is not between 0 and 1")
        places: dict[str, list[int]] = {method.name: [] for method in self.methods}
        for place, document in enumerate(documents):
            if document.split == "train":
                rng = Random(derive_seed(self.seed, "augment", epoch, document.id))
                # The first draw decides, so that a higher strength only adds documents, with the same method for each.
                is_chosen = rng.random() < strength
                names = [method.name for method in self.methods if document.kind in method.kinds]
                if is_chosen and names:
                    places[rng.choice(names)].append(place)
        copies: list[Document | None] = [None] * len(documents)
        for method in self.methods:
            originals = [documents[place] for place in places[method.name]]
            if not originals:
                continue
            seeds = [derive_seed(self.seed, "augment", epoch, document.id, method.name) for document in originals]
            start = time.perf_counter()
            changed = method.change(originals, [Random(seed) for seed in seeds])
            cost = MethodCost(len(originals), sum(copy is not None for copy in changed), time.perf_counter() - start)
            self.costs[method.name].add(cost)
            for place, copy in zip(places[method.name], changed, strict=True):
                if copy is not None:
                    meta = {**copy.meta, "augmented_from": copy.id, "augmentation": method.name}
                    copies[place] = replace(copy, id=f"{copy.id}~{method.name}~{epoch}", meta=meta)
        return copies
