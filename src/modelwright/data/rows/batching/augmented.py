"""`AugmentedLoader`: batches of packed rows in which changed copies take the place of some documents.

The plan of the rows stays as it is, so mixture, curriculum, token budget and the shares of ranks do, too. A copy stands
where its original stood and may take the padding of its row; a text that is longer is cut at its end, a conversation
that is longer is not used. Copies are made in worker processes up to `AHEAD` batches before they are needed, at a
strength that was known by then; so batch n is a function of n, of the strengths and of the updates of the mixture,
which checkpoints hold.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from modelwright.data.augment.augmenter import MethodCost
from modelwright.data.augment.row_copies import CopyJob, CopyRecipe, CopyResult, CopyWorkers, PieceCopy
from modelwright.data.rows.batch import IGNORED, TokenBatch, padded_len
from modelwright.data.rows.loader import PackedRows, RowShare

AHEAD = 8
"""Batches between the step whose loss decides the strength and the batch that has it."""

Capacity = Callable[[int], int]
"""The tokens that a row may have, from those that it has with its originals."""


class PlannedRows(Protocol):
    """A loader that can say which rows a batch has before they are read."""

    rows: PackedRows

    @property
    def num_batches_per_epoch(self) -> int: ...

    @property
    def plan_version(self) -> tuple[int, int]: ...

    def fork(self) -> "PlannedRows": ...

    def share(self, index: int, *, rank: int = 0, world_size: int = 1) -> RowShare: ...

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch: ...


@dataclass
class AugmentationCost:
    """What augmentation took of this process and of its workers since they were started."""

    num_batches: int = 0
    num_copies: int = 0
    """Pieces of rows that were replaced."""
    cpu_s: float = 0.0
    """CPU seconds of the workers."""
    wait_s: float = 0.0
    """Seconds that batches waited for copies."""
    methods: dict[str, MethodCost] = field(default_factory=dict[str, MethodCost])

    def add(self, result: CopyResult, num_copies: int, wait_s: float) -> None:
        self.num_batches += 1
        self.num_copies += num_copies
        self.cpu_s += result.cpu_s
        self.wait_s += wait_s
        for name, cost in result.costs.items():
            self.methods.setdefault(name, MethodCost()).add(cost)


class AugmentedLoader:
    """Batches of `loader` with copies by `recipe`. `set_strength` must be called for each batch before it is read."""

    def __init__(self, loader: PlannedRows, recipe: CopyRecipe, *, num_workers: int) -> None:
        self.loader = loader
        self.workers = CopyWorkers(recipe, num_workers)
        self.cost = AugmentationCost()
        self._strengths: dict[int, float] = {}
        self._fork = loader.fork()
        self._fork_version = loader.plan_version

    @property
    def num_batches_per_epoch(self) -> int:
        return self.loader.num_batches_per_epoch

    def set_strength(self, batch: int, strength: float) -> None:
        """The probability, in [0, 1], that a document of this global batch is augmented."""
        self._strengths[batch] = strength

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """This rank's share of global batch `index`, as the planned loader's."""
        share = self.loader.share(index, rank=rank, world_size=world_size)
        batch = self.loader.rows.gather(share.groups, share.num_tokens)
        started = time.perf_counter()
        result = self.workers.take(index, self._job(share, index))
        wait_s = time.perf_counter() - started
        self._look_ahead(index, rank, world_size)
        num_copies = replace_pieces(batch, result.copies, self._capacity(share), self.loader.rows.eos_id)
        self.cost.add(result, num_copies, wait_s)
        return batch.padded(1)

    def _capacity(self, share: RowShare) -> Capacity:
        """Whole rows take `seq_len` tokens. Others take what their length is padded to, whatever the rows beside them,
        which depend on the number of ranks.
        """
        seq_len = self.loader.rows.seq_len
        return (lambda used: padded_len(used, seq_len)) if share.num_tokens else (lambda used: seq_len)

    def close(self) -> None:
        """End the worker processes."""
        self.workers.close()

    def _job(self, share: RowShare, index: int) -> CopyJob:
        return CopyJob(tuple(share.groups.tolist()), tuple(share.epochs.tolist()), self._strengths[index])

    def _look_ahead(self, index: int, rank: int, world_size: int) -> None:
        """Begin with the batches whose strength is known. A plan that has changed since is seen when a batch is read,
        and its copies are made again.
        """
        if self._fork_version != self.loader.plan_version:
            self._fork, self._fork_version = self.loader.fork(), self.loader.plan_version
        self._strengths = {batch: strength for batch, strength in self._strengths.items() if batch >= index}
        for batch in [one for one in sorted(self._strengths) if one > index][:AHEAD]:
            share = self._fork.share(batch, rank=rank, world_size=world_size)
            self.workers.submit(batch, self._job(share, batch))


def replace_pieces(batch: TokenBatch, copies: Sequence[PieceCopy], capacity: Capacity, eos_id: int) -> int:
    """Put the copies into the rows of the batch, in place; returns how many pieces were replaced. eos_id: fills what is
    left of a row.
    """
    rows: dict[int, dict[int, PieceCopy]] = {}
    for copy in copies:
        rows.setdefault(copy.place, {})[copy.piece] = copy
    return sum(_replace_in_row(batch, place, changed, capacity, eos_id) for place, changed in rows.items())


def _replace_in_row(
    batch: TokenBatch, place: int, changed: dict[int, PieceCopy], capacity: Capacity, eos_id: int
) -> int:
    tokens, labels = batch.input_ids_BT[place].numpy().copy(), batch.labels_BT[place].numpy().copy()
    segments = batch.segments_BT[place].numpy()
    lengths = np.bincount(segments[segments >= 0])
    used = int(lengths.sum())
    spare, at, num_replaced = capacity(used) - used, 0, 0
    new: list[tuple[np.ndarray, np.ndarray]] = []
    for number, length in enumerate(lengths.tolist()):
        piece = tokens[at : at + length], labels[at : at + length - 1] != IGNORED
        at += length
        if number in changed and (fitting := _fitted(changed[number], length, spare)):
            spare -= len(fitting[0]) - length
            piece, num_replaced = fitting, num_replaced + 1
        new.append(piece)
    _write_row(batch, place, new, eos_id)
    return num_replaced


def _fitted(copy: PieceCopy, length: int, spare: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The tokens [N] of the copy that take the place of `length` tokens, and which of them but the first are targets
    [N - 1]; None if the copy cannot be used there.
    """
    room = length + spare if copy.is_last else length
    if copy.is_whole and len(copy.ids) > room:
        return None
    ids = copy.ids[:room]
    targets = np.ones(len(ids), dtype=bool) if copy.targets is None else copy.targets[:room].astype(bool)
    return (ids, targets[1:]) if targets[1:].any() else None


def _write_row(batch: TokenBatch, place: int, pieces: Sequence[tuple[np.ndarray, np.ndarray]], eos_id: int) -> None:
    width = batch.input_ids_BT.shape[1]
    tokens, labels = np.full(width, eos_id, dtype=np.int64), np.full(width, IGNORED, dtype=np.int64)
    positions, segments = np.zeros(width, dtype=np.int64), np.full(width, -1, dtype=np.int32)
    at = 0
    for number, (ids, predicted) in enumerate(pieces):
        end = at + len(ids)
        tokens[at:end], positions[at:end], segments[at:end] = ids, np.arange(len(ids)), number
        labels[at : end - 1] = np.where(predicted, ids[1:], IGNORED)
        at = end
    for whole, row in (
        (batch.input_ids_BT, tokens),
        (batch.labels_BT, labels),
        (batch.positions_BT, positions),
        (batch.segments_BT, segments),
    ):
        whole[place] = torch.from_numpy(row)
