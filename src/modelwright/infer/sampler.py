"""Choose the next token of every row of logits.

A row's choice depends on its logits, its parameters and its own random number, never on the other rows.

Legend: B rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelwright.infer.sequence import SamplingParams

NUCLEUS_PROBE = 128
"""Tokens looked at first for top-p; the whole vocabulary is sorted only when they do not hold enough mass."""


@dataclass(frozen=True)
class SampledToken:
    """A chosen token, its log-probability under the model (before temperature), and the likeliest alternatives."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SampleRequest:
    """How to choose one row's token: parameters, index of the new token, counts of the tokens so far."""

    params: SamplingParams
    step: int
    counts: Mapping[int, int]


def sample(logits_BV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """One draw per row of `logits_BV`."""
    logits_BV = logits_BV.float()
    scores_BV = _penalized(logits_BV, requests)
    tokens = scores_BV.argmax(dim=-1)
    random_rows = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    for row in random_rows:
        request = requests[row]
        tokens[row] = _draw(scores_BV[row], request.params, request.params.uniform(request.step))
    chosen_B = logits_BV.gather(1, tokens[:, None])[:, 0] - logits_BV.logsumexp(dim=-1)
    draws = zip(tokens.tolist(), chosen_B.tolist(), requests, range(len(requests)), strict=True)
    return [SampledToken(token, logprob, _alternatives(logits_BV[row], r.params)) for token, logprob, r, row in draws]


def _penalized(logits_BV: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    scores_BV = logits_BV
    for row, request in enumerate(requests):
        params = request.params
        if not request.counts or (params.presence_penalty == 0 and params.frequency_penalty == 0):
            continue
        if scores_BV is logits_BV:
            scores_BV = logits_BV.clone()
        ids = torch.tensor(list(request.counts), device=scores_BV.device)
        counts = torch.tensor(list(request.counts.values()), dtype=scores_BV.dtype, device=scores_BV.device)
        scores_BV[row, ids] -= params.presence_penalty + params.frequency_penalty * counts
    return scores_BV


def _draw(scores_V: Tensor, params: SamplingParams, uniform: float) -> int:
    """Inverse CDF sampling over the tokens that top-k and top-p keep, in order of their ids."""
    probabilities_V = (scores_V / max(params.temperature, 1e-5)).softmax(dim=-1)
    if params.top_k or params.top_p < 1:
        ids = _kept(probabilities_V, params)
        return int(ids[_invert(probabilities_V[ids], uniform)])
    return _invert(probabilities_V, uniform)


def _kept(probabilities_V: Tensor, params: SamplingParams) -> Tensor:
    """Ids, ascending, of the top-k tokens, restricted to the smallest set with mass `top_p`."""
    limit = min(params.top_k or probabilities_V.numel(), probabilities_V.numel())
    probe = min(limit, NUCLEUS_PROBE) if params.top_p < 1 else limit
    values, ids = probabilities_V.topk(probe)
    if params.top_p < 1:
        mass = probabilities_V.topk(limit).values.sum() if limit < probabilities_V.numel() else torch.tensor(1.0)
        target = params.top_p * float(mass)
        if probe < limit and float(values.double().sum()) < target:
            values, ids = probabilities_V.topk(limit)
        before = values.double().cumsum(0) - values
        ids = ids[: max(1, int((before < target).sum()))]
    return ids.sort().values


def _invert(probabilities: Tensor, uniform: float) -> int:
    cumulative = probabilities.double().cumsum(0)
    target = uniform * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    return index if index < len(probabilities) else int(probabilities.nonzero()[-1])


def _alternatives(logits_V: Tensor, params: SamplingParams) -> tuple[tuple[int, float], ...]:
    if params.num_logprobs == 0:
        return ()
    values, ids = logits_V.log_softmax(dim=-1).topk(min(params.num_logprobs, logits_V.numel()))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
