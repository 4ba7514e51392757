"""The seams of the loop that say what is learned and who watches: `Objective`, `Batch`, `Controller`, `StepInfo`.

An objective gives sums and the weights that normalise them; the loop divides. It never divides itself, so that any
number of microbatches and ranks gives the gradient of the whole batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from modelwright.data.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder

Batch = TokenBatch
"""What the loop splits, moves and runs the model on; `split` must never cut what belongs together."""


class Objective(Protocol):
    """What is learned."""

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's rows of the global batches `first`, `first + 1`, ..., without end.

        The global batch is a function of its number alone, whatever the number of ranks. `model` holds the weights of
        the moment in which a batch is asked for (rollouts and teachers use it).
        """
        ...

    def weights(self, batch: Batch) -> Mapping[str, Tensor]:
        """How much each loss term counts in this batch, from masks only; adds up over parts of a batch."""
        ...

    def losses(self, output: Tensor, batch: Batch, model: Decoder) -> Mapping[str, Tensor]:
        """Un-normalised sums, scalars, under the keys of `weights`; `output` is the hidden states [B, T, D]."""
        ...


class BatchSource(Protocol):
    """What objectives read from: a pure function from a batch's number to its rows."""

    @property
    def num_batches_per_epoch(self) -> int: ...

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch: ...


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """One finished step, as controllers and metrics see it.

    step: updates finished, from 1; losses: each term, normalised over the whole batch; loss: their sum; grad_norm:
    before clipping; num_tokens: of all ranks, padding left out; mfu: model FLOPs utilisation in [0, 1], 0 when no peak
    rate is known; peak_flops: the rate of one rank that it refers to, raised when a step is faster; data_wait_s: time
    spent waiting for the batch, and exchange_s: in the transport and at meetings, with compression and waiting for
    other ranks; both are parts of step_time_s; skipped: the update was left out, because something was not finite or
    out of proportion; bytes_sent: by this rank since the start, over all of its connections and with their headers,
    None where the kernel does not count them; scalars: what updates add.
    """

    step: int
    loss: float
    losses: Mapping[str, float]
    grad_norm: float
    learning_rate: float
    num_tokens: int
    tokens_per_s: float
    mfu: float
    data_wait_s: float
    exchange_s: float
    step_time_s: float
    skipped: bool
    bytes_sent: int | None
    peak_flops: float = 0.0
    scalars: Mapping[str, float] = field(default_factory=dict)

    def as_record(self) -> dict[str, float | int | bool]:
        """The step's metrics, flat: loss terms as `loss/<name>` where there are several; nothing for what is None."""
        terms = {f"loss/{name}": value for name, value in self.losses.items()} if len(self.losses) > 1 else {}
        plain = {key: value for key, value in vars(self).items() if key not in ("step", "losses", "scalars")}
        plain = {key: value for key, value in plain.items() if value is not None}
        return {**plain, **terms, **self.scalars}


class Controller(Protocol):
    """Looks at finished steps and changes what it was built around; its state is in the checkpoint."""

    every: int
    """It is shown every `every`-th step."""

    def observe(self, info: StepInfo) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Tensors and JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def forward(model: Decoder, batch: Batch) -> Tensor:
    """Hidden states [B, T, D] of packed rows; attention stays within each document."""
    return model(batch.input_ids_BT, batch.positions_BT, packed_attend(batch.segments_BT))
