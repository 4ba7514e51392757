"""Loaders that work ahead of the training step: with changed copies of documents, and with reads of rows and images.

`AugmentedLoader`: the plan of the rows stays unchanged, and so do mixture, curriculum, token budget and the shares of
ranks. A copy has the place of its original and may use the padding of its row; a text that is longer is cut at its end,
a conversation that is longer is not used. Worker processes make copies up to `AHEAD` batches before they are needed, at
a strength that is known by then; so batch n is a function of n and of the checkpoint's strengths and updates of the
mixture.

`LookaheadLoader` reads the rows of coming batches, in the order of the loader's plan, and assembles the next batch.
Both happen in other threads while a step computes, because a thread that trains while others read waits for the
interpreter's lock at every array operation. An assembled batch is used only if its rows are still those of the loader's
plan when the batch is requested; so batches are the same with and without, also after a resume. `ImagesAhead` does the
same for images.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from modelwright.data.augment.augmenter import CopyJob, CopyRecipe, CopyWorkers, MethodCost, PieceCopy
from modelwright.data.rows.batch import IGNORED, TokenBatch, padded_len
from modelwright.data.rows.cache.reader import BlockReader
from modelwright.data.rows.loader import PackedLoader, PackedRows, PlannedLoader, RowShare

AHEAD = 8
"""Number of batches between the step whose loss decides the strength and the batch with that strength."""

Capacity = Callable[[int], int]
"""Returns the tokens that a row may have, from the tokens of its originals."""


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

    def __init__(self, loader: "PlannedRows", recipe: CopyRecipe, *, num_workers: int) -> None:
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


Planned = TypeVar("Planned")
Tokens = tuple[np.ndarray, np.ndarray | None]
"""Tokens [N, seq_len] and loss mask [N, seq_len] of rows, None if they have none."""


def share_of(loader: "PlannedRows", index: int, rank: int, world_size: int) -> RowShare:
    """Returns a rank's rows; a `Look`."""
    return loader.share(index, rank=rank, world_size=world_size)


class PlanAhead(Generic[Planned]):
    """Results of `look` in the plan of `loader`, for a batch and the `num_ahead` batches after it.

    The plan is read from a fork of the loader, which is renewed whenever the plan may have changed.
    """

    def __init__(self, loader: "PlannedRows", look: "Look[Planned]", *, num_ahead: int) -> None:
        self._loader = loader
        self._look = look
        self._num_ahead = num_ahead
        self._fork = loader.fork()
        self._plan = (loader.plan_version, 0, 1)
        self._known: dict[int, Planned] = {}

    def of(self, index: int, rank: int, world_size: int) -> dict[int, Planned]:
        """Returns the results by number of the batch, in order, with the same objects while the plan stays."""
        plan = (self._loader.plan_version, rank, world_size)
        if plan != self._plan:
            self._fork, self._plan, self._known = self._loader.fork(), plan, {}
        planned = dict[int, Planned]()
        for number in range(index, index + 1 + self._num_ahead):
            known = self._known.get(number)
            planned[number] = self._look(self._fork, number, rank, world_size) if known is None else known
        self._known = planned
        return planned


def images_of(rows: PackedRows, groups: np.ndarray) -> list[int]:
    """Returns the distinct numbers of the images of groups of rows."""
    # The value of a piece is the number of its image plus 1, or 0 without an image.
    numbers = np.rint(rows.values_of(groups)).astype(np.int64) - 1
    return [number for number in dict.fromkeys(numbers.tolist()) if number >= 0]


def own_images(loader: "PlannedRows", index: int, rank: int, world_size: int) -> list[int]:
    """Returns the images of a rank's rows; a `Look`."""
    return images_of(loader.rows, loader.share(index, rank=rank, world_size=world_size).groups)


class ImagesAhead:
    """Reads images ahead with `reader`. look: returns the numbers of the images that a rank needs for a batch."""

    def __init__(
        self, reader: BlockReader[Any], loader: "PlannedRows", look: "Look[Sequence[int]]", *, num_ahead: int
    ) -> None:
        self._reader = reader
        self._plan = PlanAhead(loader, look, num_ahead=num_ahead)
        self._coming: dict[int, Sequence[int]] = {}
        self._expecting: Future[None] | None = None

    def expect(self, index: int, rank: int, world_size: int) -> None:
        """Expects the images of batch `index`, which are needed now, and those of the batches after it."""
        coming = self._plan.of(index, rank, world_size)
        numbers = list(chain.from_iterable(coming.values()))
        if self._expecting is not None:
            self._expecting.result()
            self._expecting = None
        # The images of a batch that was expected before are already being read. Further reads then begin in the
        # background, because starting them wakes many threads.
        if self._coming.get(index) is coming[index]:
            self._expecting = self._reader.background.submit(self._reader.expect, numbers)
        else:
            self._reader.expect(numbers)
        self._coming = coming


@dataclass(frozen=True)
class _Assembly:
    """A batch that the background thread assembles. expected: done when the reads of this and later ones have begun."""

    share: RowShare
    expected: Future[None]
    batch: Future[TokenBatch]

    def is_of(self, share: RowShare) -> bool:
        return self.share.num_tokens == share.num_tokens and np.array_equal(self.share.groups, share.groups)


class LookaheadLoader:
    """The batches of `loader`, whose rows `reader` reads, `num_ahead` batches ahead; 0 also assembles none ahead."""

    def __init__(self, loader: "PlannedRows", reader: BlockReader[Tokens], *, num_ahead: int) -> None:
        self.loader = loader
        self.rows = loader.rows
        self.reader = reader
        self.num_ahead = num_ahead
        self.num_batches_per_epoch = loader.num_batches_per_epoch
        self._plan = PlanAhead(loader, share_of, num_ahead=num_ahead)
        self._coming: dict[int, RowShare] = {}
        """Rows of the requested batch and of the next ones, by the number of the batch."""
        self._assembly: _Assembly | None = None

    @property
    def plan_version(self) -> tuple[int, int]:
        return self.loader.plan_version

    def fork(self) -> "PlannedRows":
        """Returns a loader with the same plan, for looking up other batches; it reads nothing ahead."""
        return self.loader.fork()

    def share(self, index: int, *, rank: int = 0, world_size: int = 1) -> RowShare:
        """Returns the rows of `batch`, which the caller reads next."""
        share = self._planned(index, rank, world_size)
        self._expect_now()
        return share

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """Returns this rank's share of global batch `index`, as `loader` does."""
        share = self._planned(index, rank, world_size)
        with self.reader.waiting_for(self.rows.rows_of(share.groups)):
            assembly = self._assembly
            # The plan may have changed since the assembly began.
            if assembly is not None and assembly.is_of(share):
                self._assembly = None
                batch = assembly.batch.result()
            else:
                self._expect_now()
                batch = self._assemble(share)
        if self.num_ahead:
            following, background = self._coming[index + 1], self.reader.background
            # Starting reads wakes many threads, which the training thread does not wait for either. One background
            # thread runs both in this order, so the rows of the batch are expected before it is assembled.
            expected = background.submit(self._expect, self._coming)
            self._assembly = _Assembly(following, expected, background.submit(self._assemble, following))
        return batch

    def _planned(self, index: int, rank: int, world_size: int) -> RowShare:
        """Returns the rows of a batch, and plans the next batches."""
        share = self.loader.share(index, rank=rank, world_size=world_size)
        self._coming = self._plan.of(index, rank, world_size)
        return share

    def _expect_now(self) -> None:
        if self._assembly is not None:
            # It must not change the reader's expectations after the call below.
            self._assembly.batch.cancel()
            if not self._assembly.expected.cancel():
                self._assembly.expected.result()
            self._assembly = None
        self._expect(self._coming)

    def _expect(self, coming: dict[int, RowShare]) -> None:
        self.reader.expect(row for share in coming.values() for row in self.rows.rows_of(share.groups).tolist())

    def _assemble(self, share: RowShare) -> TokenBatch:
        return self.rows.assemble(share.groups, share.num_tokens, self.reader.fetch).padded(1)


PlannedRows = PackedLoader | PlannedLoader | LookaheadLoader
"""Loaders that can list the rows of a batch before they are read."""
Look = Callable[[PlannedRows, int, int, int], Planned]
"""Returns a part of a loader's plan, from the loader, the number of the batch, the rank and the number of ranks."""
