"""Pretraining: every next token of every document counts the same."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from modelwright.data.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import next_token_loss, num_targets, numbered_batches
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.train.objective import BatchSource, Objective


@dataclass(frozen=True)
class Pretrain(Objective):
    """Next-token prediction on the batches of `source`; one term, `loss`, in nats per predicted token. chunk_tokens:
    number of tokens whose logits exist at a time.
    """

    source: BatchSource
    chunk_tokens: int = CHUNK_TOKENS

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return numbered_batches(self.source, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"loss": num_targets(batch)}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Mapping[str, Tensor]:
        return {"loss": next_token_loss(output, batch, model, chunk_tokens=self.chunk_tokens)}
