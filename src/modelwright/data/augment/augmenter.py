"""Decides which documents are changed, by which method and with which random stream; for packed rows, processes that
work ahead of the training step compute the tokens of the changed documents.

A copy is a pure function of (seed, epoch, document id, strength): neither workers and ranks nor the order of documents
matter, so augmented training data resumes exactly. Documents that are held out are never changed.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

import numpy as np

from modelwright.core.config import ConfigError, ModelwrightError, derive_seed
from modelwright.data.augment.augmentation import Augmentation
from modelwright.data.document import Document
from modelwright.data.rows.pack import RowOrigins, TokenSequence, targets_of_piece, with_end
from modelwright.data.workers import follow_parent

Encode = Callable[[Document], Sequence[TokenSequence]]
_MOST_BREAKS = 3
"""Breaks of the pool after which training stops: a single process may have been killed by chance."""


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


class RowEncoder(Protocol):
    """Picklable values from which a worker loads the encoder that the rows were packed with."""

    def load(self) -> Encode: ...


@dataclass(frozen=True, kw_only=True)
class CopyRecipe:
    """Settings of copies: a worker loads them once, and equal recipes make equal copies."""

    folder: Path
    """The packed rows, with their documents."""
    seq_len: int
    eos_id: int
    seed: int
    encoder: RowEncoder
    methods: Callable[[], Sequence[Augmentation]]
    """Builds the methods; compared by value."""


@dataclass(frozen=True)
class CopyJob:
    """Rows of a batch whose documents may be changed, each with its epoch."""

    rows: tuple[int, ...]
    epochs: tuple[int, ...]
    strength: float


class PieceCopy(NamedTuple):
    """A piece of a changed document. place: index of the row in the job; piece: index of the piece in the row; ids: up
    to `seq_len` tokens from the beginning of the piece; targets: their loss mask, None if all count; is_whole: the
    sequence has a loss mask, so that it must not be cut; is_last: the sequence ends with the piece.
    """

    place: int
    piece: int
    ids: np.ndarray
    targets: np.ndarray | None
    is_whole: bool
    is_last: bool


@dataclass(frozen=True)
class CopyResult:
    """Copies of a job, costs by method, and the CPU seconds of the job."""

    copies: Sequence[PieceCopy]
    costs: dict[str, MethodCost]
    cpu_s: float


@lru_cache(maxsize=1)  # a worker serves one recipe
def _load(recipe: CopyRecipe) -> tuple[Sequence[Augmentation], Encode, RowOrigins]:
    return recipe.methods(), recipe.encoder.load(), RowOrigins.open(recipe.folder)


def make_copies(recipe: CopyRecipe, job: CopyJob) -> CopyResult:
    """Makes the copies of one job. Raises `ArtifactError` if the documents of the rows are missing."""
    methods, encode, origins = _load(recipe)
    started = time.process_time()
    places = [
        (place, piece, (origin.document, epoch), origin)
        for place, (row, epoch) in enumerate(zip(job.rows, job.epochs, strict=True))
        for piece, origin in enumerate(origins.of_row(row))
    ]
    # Documents of one epoch go through the methods together; a document that several rows share is changed once.
    augmenter = Augmenter(methods, seed=recipe.seed)
    keys = list(dict.fromkeys(key for _, _, key, _ in places))
    sequences: dict[tuple[int, int], Sequence[TokenSequence]] = {}
    for epoch in dict.fromkeys(epoch for _, epoch in keys):
        numbers = [number for number, one in keys if one == epoch]
        documents = [origins.document(number) for number in numbers]
        for number, copy in zip(numbers, augmenter(documents, epoch=epoch, strength=job.strength), strict=True):
            if copy is not None:
                sequences[number, epoch] = encode(copy)
    # A piece of the copy has the place in its sequence that the original's piece has, unless the copy ends before it.
    copies: list[PieceCopy] = []
    for place, piece, key, origin in places:
        if key not in sequences or origin.part >= len(sequences[key]):
            continue
        sequence = sequences[key][origin.part]
        ids = np.asarray(sequence.ids, dtype=np.int64)
        mask = None if sequence.mask is None else np.asarray(sequence.mask, dtype=np.uint8)
        ids = with_end(ids, recipe.eos_id) if mask is None else ids
        end = min(len(ids), origin.first + recipe.seq_len)
        if end - origin.first >= 2:  # a single token has no next one to predict
            targets = targets_of_piece(mask, origin.first, end, origin.num_repeated)
            copies.append(PieceCopy(place, piece, ids[origin.first : end], targets, mask is not None, origin.is_last))
    return CopyResult(copies, augmenter.costs, time.process_time() - started)


class CopyWorkers:
    """Makes the copies of numbered batches in `num_workers` processes, which start with the first job; with 0 workers
    in this process, by `take`. A process that is killed is replaced and its jobs are repeated.
    """

    def __init__(self, recipe: CopyRecipe, num_workers: int) -> None:
        self.recipe = recipe
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._jobs: dict[int, CopyJob] = {}
        self._futures: dict[int, Future[CopyResult]] = {}
        self._num_breaks = 0

    def submit(self, number: int, job: CopyJob) -> None:
        """Begins a batch, unless the same job has already begun."""
        if not self.num_workers or self._jobs.get(number) == job:
            return
        if number in self._jobs:
            self._drop(number)
        self._jobs[number] = job
        try:
            self._begin(number)
        except BrokenProcessPool:
            self._restart()

    def take(self, number: int, job: CopyJob) -> CopyResult:
        """Waits for the copies of a batch and returns them. Jobs of earlier batches are canceled. Raises
        `ModelwrightError` if processes are killed repeatedly.
        """
        if not self.num_workers:
            return make_copies(self.recipe, job)
        for early in [one for one in self._jobs if one < number]:
            self._drop(early)
        self.submit(number, job)
        while True:
            try:
                result = self._futures[number].result()
            except BrokenProcessPool:
                self._restart()
                continue
            self._drop(number)
            return result

    def close(self) -> None:
        """Ends the processes; the next job starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
        self._jobs.clear()
        self._futures.clear()

    def _begin(self, number: int) -> None:
        if self._pool is None:
            # A fork would copy locks that threads of PyTorch hold.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.num_workers, context, initializer=_start_worker)
        self._futures[number] = self._pool.submit(make_copies, self.recipe, self._jobs[number])

    def _restart(self) -> None:
        jobs = dict(self._jobs)  # `close` forgets them
        while True:
            self._num_breaks += 1
            if self._num_breaks == _MOST_BREAKS:
                raise ModelwrightError(
                    f"processes that augment documents were killed {_MOST_BREAKS} times, perhaps for lack of memory; "
                    "lower augmentation.num_workers, or choose methods without a model"
                )
            self.close()
            self._jobs = dict(jobs)
            try:
                for number in jobs:
                    self._begin(number)
            except BrokenProcessPool:  # killed again at once, which is one more break
                continue
            return

    def _drop(self, number: int) -> None:
        self._futures.pop(number).cancel()
        del self._jobs[number]


def _start_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # a method's model must not take the cores of the training
    follow_parent()
