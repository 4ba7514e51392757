"""Next-token cross-entropy over packed rows: the objective of pretraining and of supervised fine-tuning."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from modelwright.core.config import DataError
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.train.objective import BatchSource, Objective, Terms


@dataclass(frozen=True)
class NextToken(Objective):
    """Cross-entropy of all labels of a batch with equal weights: one term, `loss`, in nats per predicted token.

    In fine-tuning the labels are the tokens of answers, and questions are context. Long answers then count more than
    short ones, unlike in a mean of per-example means.
    """

    needs = frozenset[str]()
    source: BatchSource
    chunk_tokens: int = CHUNK_TOKENS
    """Number of tokens whose logits exist at a time."""
    answers_only: bool = False
    """Refuse a first batch that predicts every token, for rows with labels only in answers."""
    further_modules: Callable[[ModelConfig], Mapping[str, nn.Module]] | None = None
    """Makes modules that are trained with a model of this shape, although the loss does not call them."""

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        return self.further_modules(config) if self.further_modules else {}

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        """Raises `DataError` if `answers_only` rows also predict questions, because their loss mask was lost."""
        batches = numbered_batches(self.source, first=first, rank=rank, world_size=world_size)
        if self.answers_only:
            batch = next(batches)
            real_BT = batch.segments_BT >= 0
            # The first token of a document is never predicted
            num_predictable = int(real_BT.sum()) - int(((batch.positions_BT == 0) & real_BT).sum())
            if 0 < num_predictable <= int(num_targets(batch)):
                raise DataError(
                    "every token in the shards is marked as an answer; pack the conversations again with their loss "
                    "mask"
                )
            yield batch
        yield from batches

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return {"loss": num_targets(batch)}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        """Tokens without a label skip the head."""
        return Terms({"loss": model.cross_entropy(output, batch.labels_BT, chunk_tokens=self.chunk_tokens)})


def numbered_batches(source: BatchSource, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
    """Yields this rank's rows of the global batches `first`, `first + 1`, ..., without end."""
    index = first
    while True:
        yield source.batch(index, rank=rank, world_size=world_size)
        index += 1


def num_targets(batch: TokenBatch) -> Tensor:
    """Number of predicted tokens, a scalar."""
    return (batch.labels_BT != IGNORED).sum()
