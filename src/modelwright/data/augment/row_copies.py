"""Computes the tokens of changed documents for packed rows, in processes that work ahead of the training step.

A copy is a pure function of (seed, epoch, document id, strength), whatever the workers and ranks: see `augmenter.py`.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from modelwright.core.errors import ModelwrightError
from modelwright.data.augment.augmentation import Augmentation
from modelwright.data.augment.augmenter import Augmenter, MethodCost
from modelwright.data.document import Document
from modelwright.data.rows.origins import RowOrigins
from modelwright.data.rows.pack import TokenSequence, targets_of_piece, with_end
from modelwright.data.workers import follow_parent

Encode = Callable[[Document], Sequence[TokenSequence]]
_MOST_BREAKS = 3
"""Breaks of the pool after which training stops: a single process may have been killed by chance."""


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
