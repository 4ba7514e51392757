"""`TokenBatch`: packed token rows, as a loader yields and a training step consumes them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

# The default `ignore_index` of PyTorch's cross entropy.
IGNORED = -100
"""Label of a token that is not predicted (padding, a prompt, the last token of a document)."""
LENGTH_MULTIPLE = 8
"""Rows of a batch are padded to a multiple of this, for matrix units and sequence parallelism."""


def part_sizes(num_groups: int, num_parts: int) -> list[int]:
    """Returns the number of groups of rows in each part: equal, or one more in the first parts if they do not divide
    evenly. Raises `ValueError` for fewer groups than parts.
    """
    if num_groups < num_parts:
        raise ValueError(f"{num_groups} groups of rows cannot be divided into {num_parts} microbatches")
    size, rest = divmod(num_groups, num_parts)
    return [size + 1] * rest + [size] * (num_parts - rest)


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Packed rows. B rows of T tokens.

    input_ids_BT int64; labels_BT int64, the next token or `IGNORED`; positions_BT int64, from 0 in each document
    piece; segments_BT int32, the number of the piece within its row, -1 for padding.

    extras: further tensors that an objective needs, by name: advantages, old log-probabilities, rewards. A name ends in
    the shape: `_B`, followed by anything, has one entry per row; `_BT` one per token, which context parallelism divides
    among ranks. group_size: number of consecutive rows that belong together (2 for a preference pair, G for a GRPO
    group); no split and no selection cuts a group.

    Rows of padding have only ignored labels and extras of zero. An objective must give them no weight.
    """

    input_ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    group_size: int = 1

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.num_rows % self.group_size:
            raise ValueError(f"group_size: {self.num_rows} rows do not divide into groups of {self.group_size}")
        for name, values in self.extras.items():
            if not re.search("_BT?[A-Za-z]*$", name):
                raise ValueError(f"extras: {name} does not end in its shape; name it {name}_B or {name}_BT")
            shape = self.input_ids_BT.shape[: 2 if _has_tokens(name) else 1]
            if values.shape[: len(shape)] != shape:
                raise ValueError(
                    f"extras: {name} has shape {list(values.shape)}, which does not start with {list(shape)}"
                )

    @classmethod
    def of_sequences(cls, sequences: Sequence[Sequence[int] | np.ndarray]) -> "TokenBatch":
        """Returns a batch for scoring: one sequence of token ids per row, padded at the end, without labels."""
        length = max(map(len, sequences))
        ids_BT = torch.zeros(len(sequences), length, dtype=torch.int64)
        segments_BT = torch.full((len(sequences), length), -1, dtype=torch.int32)
        for row, ids in enumerate(sequences):
            ids_BT[row, : len(ids)] = torch.as_tensor(ids)
            segments_BT[row, : len(ids)] = 0
        return cls(
            input_ids_BT=ids_BT,
            labels_BT=torch.full_like(ids_BT, IGNORED),
            positions_BT=torch.arange(length).expand_as(ids_BT).contiguous(),
            segments_BT=segments_BT,
        )

    @property
    def num_rows(self) -> int:
        return self.input_ids_BT.shape[0]

    @property
    def num_groups(self) -> int:
        return self.num_rows // self.group_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the rows, padding included."""
        return self.input_ids_BT.numel()

    @property
    def num_targets(self) -> int:
        """Number of labels other than `IGNORED`."""
        return int((self.labels_BT != IGNORED).sum())

    def split(self, num_parts: int) -> list["TokenBatch"]:
        """Splits into `num_parts` batches of consecutive groups, sized by `part_sizes`."""
        ends = [end * self.group_size for end in accumulate(part_sizes(self.num_groups, num_parts), initial=0)]
        # Bound as a default, because a lambda reads variables of a loop when it is called.
        return [self.map(lambda x, rows=slice(*pair): x[rows]) for pair in pairwise(ends)]

    def padded(self, num_groups: int) -> "TokenBatch":
        """Returns the batch padded with empty groups to at least `num_groups`."""
        missing = (num_groups - self.num_groups) * self.group_size
        if missing <= 0:
            return self
        padding = self.map(lambda x: x.new_zeros(missing, *x.shape[1:]))
        padding.labels_BT.fill_(IGNORED)
        padding.segments_BT.fill_(-1)
        return TokenBatch(
            input_ids_BT=torch.cat([self.input_ids_BT, padding.input_ids_BT]),
            labels_BT=torch.cat([self.labels_BT, padding.labels_BT]),
            positions_BT=torch.cat([self.positions_BT, padding.positions_BT]),
            segments_BT=torch.cat([self.segments_BT, padding.segments_BT]),
            extras={name: torch.cat([values, padding.extras[name]]) for name, values in self.extras.items()},
            group_size=self.group_size,
        )

    def take(self, groups: Tensor) -> "TokenBatch":
        """Returns the groups with these numbers, in the given order."""
        rows = self.rows_of(groups)
        return self.map(lambda x: x[rows])

    def rows_of(self, groups: Tensor) -> Tensor:
        """Returns the numbers of the rows in these groups."""
        places = torch.arange(self.group_size, device=groups.device)
        return (groups[:, None] * self.group_size + places).flatten()

    def without_weight(self, groups: Tensor) -> "TokenBatch":
        """Returns the batch with the labels and extras of padding for these groups."""
        rows = self.rows_of(groups)
        extras = {name: values.index_fill(0, rows, 0) for name, values in self.extras.items()}
        return replace(self, labels_BT=self.labels_BT.index_fill(0, rows, IGNORED), extras=extras)

    def take_tokens(self, places_S: Tensor) -> "TokenBatch":
        """Returns these positions of every row, in the given order."""
        return self.map(lambda x: x[:, places_S], of_rows=lambda x: x)

    def to(self, device: torch.device | str) -> "TokenBatch":
        # A copy to a GPU overlaps with what the host does next only from pinned memory.
        is_cuda = torch.device(device).type == "cuda"
        return self.map(lambda x: (x.pin_memory() if is_cuda and not x.is_cuda else x).to(device, non_blocking=True))

    def rows_at(self, place: int) -> "TokenBatch":
        """Returns the rows at one place of every group, as groups of one row."""
        return replace(self, group_size=1).map(lambda x: x[place :: self.group_size])

    def map(
        self, change: Callable[[Tensor], Tensor], *, of_rows: Callable[[Tensor], Tensor] | None = None
    ) -> "TokenBatch":
        """Returns the batch with every tensor changed. of_rows: the change of extras without an entry per token."""
        extras = {
            name: change(values) if of_rows is None or _has_tokens(name) else of_rows(values)
            for name, values in self.extras.items()
        }
        return TokenBatch(
            input_ids_BT=change(self.input_ids_BT),
            labels_BT=change(self.labels_BT),
            positions_BT=change(self.positions_BT),
            segments_BT=change(self.segments_BT),
            extras=extras,
            group_size=self.group_size,
        )


def _has_tokens(name: str) -> bool:
    """Returns True for the name of an extra with an entry per token."""
    return re.search("_BT[A-Za-z]*$", name) is not None


def padded_len(length: int, longest: int) -> int:
    """Returns the padded row length of a batch whose longest row has `length` tokens; at most `longest`."""
    return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)


def cut(lengths: np.ndarray, budget: int, longest: int) -> np.ndarray:
    """Returns the ends [num_batches] int64 of batches of consecutive rows, each with the most rows that fit into
    `budget` tokens, at least one. lengths: tokens of the rows, descending [N]. The last batch may be small.
    """
    ends: list[int] = []
    start = 0
    while start < len(lengths):
        # Not rounded to a multiple of 8 rows, as in fairseq: that leaves up to 7 of 15 rows of a batch empty.
        num_rows = max(1, budget // padded_len(int(lengths[start]), longest))
        start = min(start + num_rows, len(lengths))
        ends.append(start)
    return np.array(ends, dtype=np.int64)
