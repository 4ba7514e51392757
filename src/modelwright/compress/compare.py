"""An INT8 model against the model it was made from: size, speed, agreement."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.compress.int8 import weight_bytes
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder
from modelwright.ops.microbenchmark import in_turn, seconds_of


@dataclass(frozen=True, kw_only=True)
class SpeedPair:
    """Tokens per second of whole forward passes over `num_streams` sequences of `num_tokens` tokens each, medians of
    alternated repetitions."""

    num_streams: int
    num_tokens: int
    reference_tokens_per_s: float
    int8_tokens_per_s: float

    @property
    def ratio(self) -> float:
        return self.int8_tokens_per_s / self.reference_tokens_per_s


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How the two models' next-token predictions differ on the same text.

    Losses in nats per token; `divergence` is the mean KL divergence from the reference in nats; `same_first` the share
    of positions with the same likeliest token; `max_logit_gap` the largest difference of any logit.
    """

    num_tokens: int
    reference_loss: float
    int8_loss: float
    divergence: float
    same_first: float
    max_logit_gap: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Size in bytes of the weights, speed at several batch sizes, agreement."""

    reference_bytes: int
    int8_bytes: int
    speed: tuple[SpeedPair, ...]
    agreement: Agreement


def compare(
    reference: Decoder,
    int8: Decoder,
    tokens_BT: Tensor,
    *,
    shapes: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (32, 1), (1, 256)),
) -> Comparison:
    """Measure both models on held-out `tokens_BT` [rows, length], length at least 2; shapes: (streams, tokens of each)
    for the speed, no longer than the model's own rows."""
    longest = reference.config.max_seq_len
    speed = tuple(
        measure_speed(reference, int8, num_streams=streams, num_tokens=min(length, longest))
        for streams, length in shapes
    )
    agreement = measure_agreement(reference, int8, tokens_BT)
    return Comparison(
        reference_bytes=weight_bytes(reference), int8_bytes=weight_bytes(int8), speed=speed, agreement=agreement
    )


@torch.inference_mode()
def measure_speed(
    reference: Decoder, int8: Decoder, *, num_streams: int, num_tokens: int, repeats: int = 7
) -> SpeedPair:
    """Time forward passes up to each stream's next logits. `num_tokens` of 1 is the shape of decoding (without
    attention's reads of a cache), more that of a prompt.
    """
    passes = {name: _one_pass(model, num_streams, num_tokens) for name, model in (("fp32", reference), ("int8", int8))}
    measures = {name: partial(seconds_of, run, "cpu") for name, run in passes.items()}
    times = in_turn(measures, num_rounds=repeats, num_warmups=1)
    slow, fast = (num_streams * num_tokens / statistics.median(times[name]) for name in ("fp32", "int8"))
    return SpeedPair(
        num_streams=num_streams, num_tokens=num_tokens, reference_tokens_per_s=slow, int8_tokens_per_s=fast
    )


@torch.inference_mode()
def measure_agreement(reference: Decoder, int8: Decoder, tokens_BT: Tensor) -> Agreement:
    """Compare next-token distributions row by row."""
    sums = torch.zeros(4, dtype=torch.float64)
    count, gap = 0, 0.0
    for tokens_T in tokens_BT:
        left, right = (_logits(model, tokens_T) for model in (reference, int8))
        log_left, log_right = left.log_softmax(-1), right.log_softmax(-1)
        labels = tokens_T[1:]
        sums[0] += F.nll_loss(log_left, labels, reduction="sum")
        sums[1] += F.nll_loss(log_right, labels, reduction="sum")
        sums[2] += (log_left.exp() * (log_left - log_right)).sum()
        sums[3] += (left.argmax(-1) == right.argmax(-1)).sum()
        gap = max(gap, float((left - right).abs().max()))
        count += len(labels)
    loss, int8_loss, divergence, same = (sums / count).tolist()
    return Agreement(
        num_tokens=count,
        reference_loss=loss,
        int8_loss=int8_loss,
        divergence=divergence,
        same_first=same,
        max_logit_gap=gap,
    )


def _one_pass(model: Decoder, num_streams: int, num_tokens: int) -> Callable[[], Tensor]:
    tokens_BT = torch.arange(num_streams * num_tokens).view(num_streams, num_tokens) % model.config.vocab_size
    positions_BT = torch.arange(num_tokens).expand(num_streams, -1)
    return lambda: model.logits(model(tokens_BT, positions_BT, causal_attend())[:, -1:])


def _logits(model: Decoder, tokens_T: Tensor) -> Tensor:
    positions_1T = torch.arange(len(tokens_T))[None]
    return model.logits(model(tokens_T[None], positions_1T, causal_attend()))[0, :-1].float()
