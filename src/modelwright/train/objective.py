"""`Objective`: what is learned; `Batch` and `BatchSource`: what it is learned from.

An objective returns sums and the weights that normalize them; the training step divides. It never divides itself, so
that any number of microbatches and ranks gives the gradient of the whole batch.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from modelwright.data.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder

Batch = TokenBatch
"""What the loop splits, moves and runs the model on: rows, named extra tensors, and groups that nothing cuts."""


class Objective(Protocol):
    """What is learned. needs: properties of a run that it relies on (`core/compatibility.py`), such as whole rows on
    every rank.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's rows of the global batches `first`, `first + 1`, ..., without end.

        The global batch is a function of its number, of the weights and of this objective's state, whatever the number
        of ranks. `model` is this rank's part, with its weights at the time when a batch is requested: rollouts are
        generated here, and frozen models evaluate the rows here (`train/frozen_model.py`).
        """
        ...

    def weights(self, batch: Batch) -> Mapping[str, Tensor]:
        """How much each loss term counts in this batch, from masks only; adds up over parts of a batch."""
        ...

    def losses(self, output: Tensor, batch: Batch, model: Decoder) -> Mapping[str, Tensor]:
        """Un-normalized sums, scalars, under the keys of `weights`; `output` is the hidden states [B, T, D]."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint needs for `batches` to continue with the same bits: a rollout, a KL coefficient.

        Tensors and JSON values; empty by default. All values are equal on all ranks, except for tensors under the key
        `rows`, whose first dimension is this data rank's rows: a checkpoint has those of the global batch, and any
        number of data ranks can resume with them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before the first batch after a resume."""


class BatchSource(Protocol):
    """The source that objectives read from: a pure function from a batch number to its rows."""

    @property
    def num_batches_per_epoch(self) -> int: ...

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch: ...


def forward(model: Decoder, batch: Batch) -> Tensor:
    """Hidden states [B, T, D] of packed rows; attention stays within each document."""
    return model(batch.input_ids_BT, batch.positions_BT, packed_attend(batch.segments_BT, model.config.windows))
