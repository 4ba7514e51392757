"""A batch of packed token rows: what a loader gives and a training step eats."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token that is not predicted (padding, a prompt, the last token of a document)."""


def part_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Rows of each part: equal, or where they do not divide one more in the first ones. Raises `ValueError` when there
    are fewer rows than parts."""
    if num_rows < num_parts:
        raise ValueError(f"{num_rows} rows cannot be cut into {num_parts} microbatches")
    size, rest = divmod(num_rows, num_parts)
    return [size + 1] * rest + [size] * (num_parts - rest)


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Packed rows. B rows of T tokens.

    input_ids_BT int64; labels_BT int64, the next token or `IGNORED`; positions_BT int64, from 0 in each document
    piece; segments_BT int32, the number of the piece within its row, -1 for padding.
    """

    input_ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor

    @property
    def num_rows(self) -> int:
        return self.input_ids_BT.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens in the rows, padding included."""
        return self.input_ids_BT.numel()

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted."""
        return int((self.labels_BT != IGNORED).sum())

    def split(self, num_parts: int) -> list["TokenBatch"]:
        """Cut into `num_parts` batches of consecutive rows, as `part_sizes` says."""
        ends = list(itertools.accumulate(part_sizes(self.num_rows, num_parts), initial=0))
        return [self._map(lambda x, rows=slice(*pair): x[rows]) for pair in itertools.pairwise(ends)]

    def padded(self, num_rows: int) -> "TokenBatch":
        """With rows of padding at the end, which predict nothing, if there are fewer rows than `num_rows`."""
        missing = num_rows - self.num_rows
        if missing <= 0:
            return self
        row_len = self.input_ids_BT.shape[1]
        padding = TokenBatch(
            input_ids_BT=self.input_ids_BT.new_zeros(missing, row_len),
            labels_BT=self.labels_BT.new_full((missing, row_len), IGNORED),
            positions_BT=self.positions_BT.new_zeros(missing, row_len),
            segments_BT=self.segments_BT.new_full((missing, row_len), -1),
        )
        return TokenBatch(**{name: torch.cat([rows, getattr(padding, name)]) for name, rows in vars(self).items()})

    def take(self, rows: Tensor) -> "TokenBatch":
        """The rows with these numbers, in this order."""
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device | str) -> "TokenBatch":
        return self._map(lambda x: x.to(device, non_blocking=True))

    def _map(self, change) -> "TokenBatch":
        return TokenBatch(
            input_ids_BT=change(self.input_ids_BT),
            labels_BT=change(self.labels_BT),
            positions_BT=change(self.positions_BT),
            segments_BT=change(self.segments_BT),
        )
