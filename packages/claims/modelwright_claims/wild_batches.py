"""Training batches of which some are wild: random labels, and a loss that counts many times as much.

That is what broken data or a broken loss weight does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.train.objective import Objective, Terms


@dataclass(frozen=True, kw_only=True)
class Wild:
    """Every `every`-th batch from `first` on counts `factor` times as much, with random labels."""

    every: int = 25
    first: int = 20
    factor: float = 20.0

    def is_wild(self, number: int) -> bool:
        return number >= self.first and (number - self.first) % self.every == 0


@dataclass
class WildBatches(Objective):
    """An objective with wild batches in training; evaluation stays as it is."""

    inner: NextToken
    wild: Wild
    vocab_size: int
    seed: int
    is_wild: bool = False

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        result = self.inner.batches(model, first=first, rank=rank, world_size=world_size)
        for number, batch in enumerate(result, start=first):
            self.is_wild = self.wild.is_wild(number)
            yield self._spoil(batch, number) if self.is_wild else batch

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return self.inner.weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        factor = self.wild.factor if self.is_wild and torch.is_grad_enabled() else 1.0
        losses = self.inner.losses(output, batch, model).losses
        return Terms({name: factor * loss for name, loss in losses.items()})

    def _spoil(self, batch: TokenBatch, number: int) -> TokenBatch:
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "wild", number))
        labels = torch.randint(self.vocab_size, batch.labels_BT.shape, generator=draw)
        labels = torch.where(batch.labels_BT == IGNORED, IGNORED, labels)
        return TokenBatch(
            input_ids_BT=batch.input_ids_BT,
            labels_BT=labels,
            positions_BT=batch.positions_BT,
            segments_BT=batch.segments_BT,
        )
