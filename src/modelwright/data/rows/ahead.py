"""`AugmentedLoader`: batches of packed rows in which changed copies replace some documents.

The plan of the rows stays unchanged, and so do mixture, curriculum, token budget and the shares of ranks. A copy has
the place of its original and may use the padding of its row; a text that is longer is cut at its end, a conversation
that is longer is not used. Worker processes make copies up to `AHEAD` batches before they are needed, at a strength
that is known by then; so batch n is a function of n and of the checkpoint's strengths and updates of the mixture.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from modelwright.data.augment.augmenter import CopyJob, CopyRecipe, CopyWorkers, MethodCost, PieceCopy
from modelwright.data.rows.batch import IGNORED, TokenBatch, padded_len
from modelwright.data.rows.loader import PackedRows, RowShare

AHEAD = 8
"""Number of batches between the step whose loss decides the strength and the batch with that strength."""

Capacity = Callable[[int], int]
"""Returns the tokens that a row may have, from the tokens of its originals."""


class PlannedRows(Protocol):
    """A loader that can list the rows of a batch before they are read."""

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
    """Cost of augmentation for this process and its workers since they were started."""

    num_batches: int = 0
    num_copies: int = 0
    """Number of pieces of rows that were replaced."""
    cpu_s: float = 0.0
    """CPU seconds of the workers."""
    wait_s: float = 0.0
    """Seconds that batches waited for copies."""
    methods: dict[str, MethodCost] = field(default_factory=dict[str, MethodCost])


class AugmentedLoader:
    """Batches of `loader` with copies by `recipe`. `set_strength` must be called for each batch before it is read."""

    def __init__(self, loader: PlannedRows, recipe: CopyRecipe, *, num_workers: int) -> None:
        self.loader = loader
        self.num_batches_per_epoch = loader.num_batches_per_epoch
        self.workers = CopyWorkers(recipe, num_workers)
        self.cost = AugmentationCost()
        self._strengths: dict[int, float] = {}
        self._fork = loader.fork()
        self._fork_version = loader.plan_version

    def set_strength(self, batch: int, strength: float) -> None:
        """Sets the probability, in [0, 1], that a document of this global batch is augmented."""
        self._strengths[batch] = strength

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """Returns this rank's share of global batch `index`, planned by `loader`."""
        share = self.loader.share(index, rank=rank, world_size=world_size)
        batch = self.loader.rows.gather(share.groups, share.num_tokens)
        started = time.perf_counter()
        result = self.workers.take(index, self._job(share, index))
        self.cost.wait_s += time.perf_counter() - started
        # Workers begin the batches whose strength is known. If the plan changes after that, `take` gets another job for
        # the batch and its copies are made again.
        if self._fork_version != self.loader.plan_version:
            self._fork, self._fork_version = self.loader.fork(), self.loader.plan_version
        self._strengths = {number: strength for number, strength in self._strengths.items() if number >= index}
        for number in [one for one in sorted(self._strengths) if one > index][:AHEAD]:
            self.workers.submit(number, self._job(self._fork.share(number, rank=rank, world_size=world_size), number))
        # Whole rows have `seq_len` tokens. A row of a token budget may grow to the length that it alone would be padded
        # to, not to that of the batch: the other rows depend on the number of ranks.
        seq_len, is_whole = self.loader.rows.seq_len, not share.num_tokens
        num_copies = replace_pieces(
            batch,
            result.copies,
            lambda used: seq_len if is_whole else padded_len(used, seq_len),
            self.loader.rows.eos_id,
        )
        self.cost.num_batches += 1
        self.cost.num_copies += num_copies
        self.cost.cpu_s += result.cpu_s
        for name, cost in result.costs.items():
            self.cost.methods.setdefault(name, MethodCost()).add(cost)
        return batch.padded(1)

    def close(self) -> None:
        """Ends the worker processes."""
        self.workers.close()

    def _job(self, share: RowShare, index: int) -> CopyJob:
        return CopyJob(tuple(share.groups.tolist()), tuple(share.epochs.tolist()), self._strengths[index])


def replace_pieces(batch: TokenBatch, copies: Sequence[PieceCopy], capacity: Capacity, eos_id: int) -> int:
    """Puts the copies into the rows of the batch, in place; returns the number of replaced pieces."""
    rows: dict[int, dict[int, PieceCopy]] = {}
    for copy in copies:
        rows.setdefault(copy.place, {})[copy.piece] = copy
    num_replaced = 0
    for place, changed in rows.items():
        tokens, labels = batch.input_ids_BT[place].numpy().copy(), batch.labels_BT[place].numpy().copy()
        segments = batch.segments_BT[place].numpy()
        lengths = np.bincount(segments[segments >= 0])
        used = int(lengths.sum())
        spare, at = capacity(used) - used, 0
        pieces: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # tokens [N], and whether each but the first is a target [N - 1]
        for number, length in enumerate(lengths.tolist()):
            piece = tokens[at : at + length], labels[at : at + length - 1] != IGNORED
            at += length
            if (copy := changed.get(number)) is not None:
                # Only the end of a sequence may grow: the next piece of a longer one continues after `length` tokens.
                room = length + spare if copy.is_last else length
                ids = copy.ids[:room]
                targets = np.ones(len(ids), dtype=bool) if copy.targets is None else copy.targets[:room].astype(bool)
                if targets[1:].any() and not (copy.is_whole and len(copy.ids) > room):
                    spare -= len(ids) - length
                    piece, num_replaced = (ids, targets[1:]), num_replaced + 1
            pieces.append(piece)
        # Later pieces move when an earlier one changes its length, so the row is written anew.
        tokens, labels = np.full(len(tokens), eos_id, dtype=np.int64), np.full(len(tokens), IGNORED, dtype=np.int64)
        positions, segments = np.zeros(len(tokens), dtype=np.int64), np.full(len(tokens), -1, dtype=np.int32)
        at = 0
        for number, (ids, predicted) in enumerate(pieces):
            end = at + len(ids)
            tokens[at:end], positions[at:end], segments[at:end] = ids, np.arange(len(ids)), number
            labels[at : end - 1] = np.where(predicted, ids[1:], IGNORED)
            at = end
        batch.input_ids_BT[place], batch.labels_BT[place] = torch.from_numpy(tokens), torch.from_numpy(labels)
        batch.positions_BT[place], batch.segments_BT[place] = torch.from_numpy(positions), torch.from_numpy(segments)
    return num_replaced
