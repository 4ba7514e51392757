"""Next-token cross-entropy over packed rows: what pretraining and SFT share.

Source of the loss: negative log-likelihood in nats, summed over predicted tokens; the loop divides by their number.
"""

from collections.abc import Iterator

from torch import Tensor

from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.train.objective import BatchSource


def numbered_batches(source: BatchSource, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
    """This rank's rows of the global batches `first`, `first + 1`, ..., without end."""
    index = first
    while True:
        yield source.batch(index, rank=rank, world_size=world_size)
        index += 1


def num_targets(batch: TokenBatch) -> Tensor:
    """Tokens that are predicted, a scalar."""
    return (batch.labels_BT != IGNORED).sum()


def next_token_loss(hidden_BTD: Tensor, batch: TokenBatch, model: Decoder, *, chunk_tokens: int) -> Tensor:
    """Sum of the negative log-likelihoods of the labels; logits never exist for more than `chunk_tokens` tokens at a
    time. Tokens without a label skip the head.
    """
    return model.cross_entropy(hidden_BTD, batch.labels_BT, chunk_tokens=chunk_tokens)
