"""Supervised fine-tuning: only the tokens of answers are learned; questions are context.

Which tokens are answers is in the labels of the packed shards; this module rejects shards in which all tokens are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from modelwright.core.errors import DataError
from modelwright.data.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import next_token_loss, num_targets, numbered_batches
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.train.objective import BatchSource, Objective


@dataclass(frozen=True)
class Sft(Objective):
    """Next-token prediction on answers; one term, `loss`, in nats per answer token of the whole batch.

    Every answer token counts the same, so long answers count more than short ones (a mean of per-example means would
    not). chunk_tokens: number of tokens whose logits exist at a time.
    """

    source: BatchSource
    chunk_tokens: int = CHUNK_TOKENS

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        """Raises `DataError` if the first batch predicts questions too: the loss mask was lost on the way."""
        batches = numbered_batches(self.source, first=first, rank=rank, world_size=world_size)
        batch = next(batches)
        _require_mask(batch)
        yield batch
        yield from batches

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"loss": num_targets(batch)}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Mapping[str, Tensor]:
        return {"loss": next_token_loss(output, batch, model, chunk_tokens=self.chunk_tokens)}


def _require_mask(batch: TokenBatch) -> None:
    real_BT = batch.segments_BT >= 0
    num_predictable = int(real_BT.sum()) - int(((batch.positions_BT == 0) & real_BT).sum())
    if 0 < num_predictable <= int(num_targets(batch)):
        raise DataError(
            "every token in the shards is marked as an answer; pack the conversations again with their loss mask"
        )
