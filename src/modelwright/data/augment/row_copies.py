"""Tokens of changed documents for packed rows: what a loader's worker computes.

A copy is a function of (seed, epoch, document id, strength), as in `augmenter.py`; workers and ranks do not matter.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from modelwright.data.augment.augmentation import Augmentation
from modelwright.data.augment.augmenter import Augmenter, MethodCost
from modelwright.data.document import Document
from modelwright.data.pack import TokenSequence, targets_of_piece, with_end
from modelwright.data.row_origins import PieceOrigin, RowOrigins

Encode = Callable[[Document], Sequence[TokenSequence]]


class RowEncoder(Protocol):
    """Plain values from which a worker loads the encoder that the rows were packed with."""

    def load(self) -> Encode: ...


@dataclass(frozen=True, kw_only=True)
class CopyRecipe:
    """How copies are made: values that a worker gets once and that are equal for equal copies."""

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
    """A piece of a changed document. place: of the row in the job; piece: number in the row; ids: up to `seq_len`
    tokens from where the piece begins; targets: the loss mask of these, None if all count; is_whole: the sequence has a
    mask of its own, so that it may not be cut; is_last: whether the sequence ends with the piece.
    """

    place: int
    piece: int
    ids: np.ndarray
    targets: np.ndarray | None
    is_whole: bool
    is_last: bool


@dataclass(frozen=True)
class CopyResult:
    """What became of a job. cpu_s: CPU seconds that it took."""

    copies: Sequence[PieceCopy]
    costs: dict[str, MethodCost]
    cpu_s: float


def make_copies(recipe: CopyRecipe, job: CopyJob) -> CopyResult:
    """The copies of one job. Methods and tokenizer are loaded at the first one."""
    return _row_copies(recipe)(job)


@lru_cache(maxsize=1)
def _row_copies(recipe: CopyRecipe) -> "RowCopies":
    return RowCopies(recipe)


class RowCopies:
    """Makes copies by one recipe. Raises `ArtifactError` if the rows have no documents."""

    def __init__(self, recipe: CopyRecipe) -> None:
        self.recipe = recipe
        self.methods = recipe.methods()
        self.encode = recipe.encoder.load()
        self.origins = RowOrigins.open(recipe.folder)

    def __call__(self, job: CopyJob) -> CopyResult:
        started = time.process_time()
        places = [
            (place, piece, (origin.document, epoch), origin)
            for place, (row, epoch) in enumerate(zip(job.rows, job.epochs, strict=True))
            for piece, origin in enumerate(self.origins.of_row(row))
        ]
        augmenter = Augmenter(self.methods, seed=self.recipe.seed)
        sequences = self._sequences(augmenter, list(dict.fromkeys(key for _, _, key, _ in places)), job.strength)
        copies = [
            copy
            for place, piece, key, origin in places
            if key in sequences and (copy := self._piece(place, piece, origin, sequences[key]))
        ]
        return CopyResult(copies, augmenter.costs, time.process_time() - started)

    def _sequences(
        self, augmenter: Augmenter, keys: Sequence[tuple[int, int]], strength: float
    ) -> dict[tuple[int, int], Sequence[TokenSequence]]:
        """The sequences of the copy of each (document, epoch) that is changed."""
        result = {}
        for epoch in dict.fromkeys(epoch for _, epoch in keys):
            numbers = [number for number, one in keys if one == epoch]
            documents = [self.origins.document(number) for number in numbers]
            for number, copy in zip(numbers, augmenter(documents, epoch=epoch, strength=strength), strict=True):
                if copy is not None:
                    result[number, epoch] = self.encode(copy)
        return result

    def _piece(
        self, place: int, piece: int, origin: PieceOrigin, sequences: Sequence[TokenSequence]
    ) -> PieceCopy | None:
        """The tokens of the copy where the piece of the original is; None if it ends before them."""
        if origin.part >= len(sequences):
            return None
        sequence = sequences[origin.part]
        ids = np.asarray(sequence.ids, dtype=np.int64)
        mask = None if sequence.mask is None else np.asarray(sequence.mask, dtype=np.uint8)
        ids = with_end(ids, self.recipe.eos_id) if mask is None else ids
        end = min(len(ids), origin.first + self.recipe.seq_len)
        if end - origin.first < 2:
            return None
        targets = targets_of_piece(mask, origin.first, end, origin.num_repeated)
        return PieceCopy(place, piece, ids[origin.first : end], targets, mask is not None, origin.is_last)
