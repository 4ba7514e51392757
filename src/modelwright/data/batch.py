"""A batch of packed token rows: what a loader gives and a training step eats."""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token that is not predicted (padding, a prompt, the last token of a document)."""


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
        """Cut into `num_parts` batches of consecutive rows. Raises `ValueError` when the rows do not divide."""
        if self.num_rows % num_parts:
            raise ValueError(f"{self.num_rows} rows cannot be cut into {num_parts} equal microbatches")
        size = self.num_rows // num_parts
        return [self._map(lambda x, i=i: x[i * size : (i + 1) * size]) for i in range(num_parts)]

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
