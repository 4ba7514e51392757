"""Measures the agreement of a model's predictions with those of the model that it was made from."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences of the two models' next-token predictions on the same text. Losses in nats per token; accuracies are
    the shares of tokens that were the likeliest one; `divergence` is the mean KL divergence from the reference in nats;
    `same_first` the share of positions with the same likeliest token; `max_logit_gap` the largest difference of any
    logit.
    """

    num_tokens: int
    reference_loss: float
    int8_loss: float
    reference_accuracy: float
    int8_accuracy: float
    divergence: float
    same_first: float
    max_logit_gap: float


@torch.inference_mode()
def measure_agreement(reference: Decoder, int8: Decoder, tokens_BT: Tensor) -> Agreement:
    """Compare next-token distributions row by row."""
    sums = torch.zeros(6, dtype=torch.float64)
    count, gap = 0, 0.0
    for tokens_T in tokens_BT:
        left, right = (
            model.logits(model(tokens_T[None], torch.arange(len(tokens_T))[None], causal_attend()))[0, :-1].float()
            for model in (reference, int8)
        )
        log_left, log_right = left.log_softmax(-1), right.log_softmax(-1)
        # The last position predicts a token that is not known, so its logits are left out.
        labels = tokens_T[1:]
        sums[0] += F.nll_loss(log_left, labels, reduction="sum")
        sums[1] += F.nll_loss(log_right, labels, reduction="sum")
        sums[2] += (log_left.exp() * (log_left - log_right)).sum()
        sums[3] += (left.argmax(-1) == right.argmax(-1)).sum()
        sums[4] += (left.argmax(-1) == labels).sum()
        sums[5] += (right.argmax(-1) == labels).sum()
        gap = max(gap, float((left - right).abs().max()))
        count += len(labels)
    loss, int8_loss, divergence, same, accuracy, int8_accuracy = (sums / count).tolist()
    return Agreement(
        num_tokens=count,
        reference_loss=loss,
        int8_loss=int8_loss,
        reference_accuracy=accuracy,
        int8_accuracy=int8_accuracy,
        divergence=divergence,
        same_first=same,
        max_logit_gap=gap,
    )
