"""Choose the next token of every row of logits, and score tokens that are given.

A row's choice depends on its logits, its parameters and its own random number, never on the other rows.

Legend: B rows, N rows of a prompt, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelwright.infer.sequence import SamplingParams, ScoredToken
from modelwright.ops.decode_step import summarized

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
    """How to choose one row's token: parameters, index of the new token, counts of the new tokens so far, the prompt,
    and which tokens a constraint allows, boolean [V]; None allows all.
    """

    params: SamplingParams
    step: int
    counts: Mapping[int, int]
    prompt_ids: Sequence[int] = ()
    allowed_V: Tensor | None = None

    @property
    def bans_stop(self) -> bool:
        """Whether a token that ends the request may not come yet."""
        return self.step < self.params.min_tokens and bool(self.params.stop_ids)

    @property
    def has_penalties(self) -> bool:
        params = self.params
        has_earlier = bool(self.counts) and bool(params.presence_penalty or params.frequency_penalty)
        return has_earlier or params.repetition_penalty != 1

    @property
    def changes_scores(self) -> bool:
        """Whether scores differ from logits."""
        return self.has_penalties or self.bans_stop or bool(self.params.logit_bias) or self.allowed_V is not None


def sample(logits_BV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """One draw per row of `logits_BV`."""
    logits_BV = logits_BV.float()
    scores_BV = _scores(logits_BV, requests)
    tokens, log_sums_B = summarized(logits_BV)
    if scores_BV is not logits_BV:
        tokens = scores_BV.argmax(dim=-1)
    random_rows = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    whole_rows = [row for row in random_rows if not requests[row].params.truncates]
    if whole_rows:
        tokens[whole_rows] = _drawn_from_all(scores_BV[whole_rows], [requests[row] for row in whole_rows])
    for row in random_rows:
        request = requests[row]
        if request.params.truncates:
            tokens[row] = _draw(scores_BV[row], request.params, request.params.uniform(request.step))
    chosen_B = logits_BV.gather(1, tokens[:, None])[:, 0] - log_sums_B
    draws = zip(tokens.tolist(), chosen_B.tolist(), requests, range(len(requests)), strict=True)
    return [SampledToken(token, logprob, _alternatives(logits_BV[row], r.params)) for token, logprob, r, row in draws]


def _scores(logits_BV: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """Logits with constraints, biases and penalties, [B, V]: in vLLM's order, so that settings mean the same."""
    if not any(request.changes_scores for request in requests):
        return logits_BV
    scores_BV = logits_BV.clone()
    for scores_V, request in zip(scores_BV, requests, strict=True):
        params = request.params
        if request.allowed_V is not None:
            scores_V.masked_fill_(~request.allowed_V.to(scores_V.device), -torch.inf)
        for token, bias in params.logit_bias:
            scores_V[token] += bias
        if request.bans_stop:
            scores_V[list(params.stop_ids)] = -torch.inf
        if request.has_penalties:
            _penalize(scores_V, request)
    return scores_BV


def _penalize(scores_V: Tensor, request: SampleRequest) -> None:
    params, counts = request.params, request.counts
    if params.repetition_penalty != 1:
        ids = torch.tensor(sorted({*request.prompt_ids, *counts}), dtype=torch.long, device=scores_V.device)
        earlier = scores_V[ids]
        scores_V[ids] = torch.where(
            earlier > 0, earlier / params.repetition_penalty, earlier * params.repetition_penalty
        )
    if counts:
        ids = torch.tensor(list(counts), device=scores_V.device)
        occurrences = torch.tensor(list(counts.values()), dtype=scores_V.dtype, device=scores_V.device)
        scores_V[ids] -= params.presence_penalty + params.frequency_penalty * occurrences


def _drawn_from_all(scores_BV: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """A draw from all tokens for each row, int64 [B], in one pass over the rows."""
    temperatures = [max(request.params.temperature, 1e-5) for request in requests]
    temperatures_B1 = torch.tensor(temperatures, device=scores_BV.device)[:, None]
    uniforms = [request.params.uniform(request.step) for request in requests]
    return _invert((scores_BV / temperatures_B1).softmax(dim=-1), uniforms)


def _draw(scores_V: Tensor, params: SamplingParams, uniform: float) -> int:
    """A draw from the tokens that min-p, top-k and top-p keep, in order of their ids."""
    probabilities_V = (scores_V / max(params.temperature, 1e-5)).softmax(dim=-1)
    if params.min_p:
        probabilities_V = probabilities_V.where(probabilities_V >= params.min_p * probabilities_V.max(), 0.0)
    if params.top_k or params.top_p < 1:
        ids = _kept(probabilities_V, params)
        return int(ids[_invert(probabilities_V[ids][None], [uniform])])
    return int(_invert(probabilities_V[None], [uniform]))


def _kept(probabilities_V: Tensor, params: SamplingParams) -> Tensor:
    """Ids, ascending, of the top-k tokens, restricted to the smallest set with mass `top_p`."""
    limit = min(params.top_k or probabilities_V.numel(), probabilities_V.numel())
    probe = min(limit, NUCLEUS_PROBE) if params.top_p < 1 else limit
    values, ids = probabilities_V.topk(probe)
    if params.top_p < 1:
        is_cut = limit < probabilities_V.numel() or params.min_p > 0
        target = params.top_p * (float(probabilities_V.topk(limit).values.sum()) if is_cut else 1.0)
        if probe < limit and float(values.double().sum()) < target:
            values, ids = probabilities_V.topk(limit)
        before = values.double().cumsum(0) - values
        ids = ids[: max(1, int((before < target).sum()))]
    return ids.sort().values


def _invert(probabilities_BV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Inverse CDF sampling: for each row the place, int64 [B], that a number from [0, 1) falls on."""
    cumulative_BV = probabilities_BV.double().cumsum(1)
    uniforms_B1 = torch.tensor(uniforms, dtype=torch.float64, device=probabilities_BV.device)[:, None]
    places_B = torch.searchsorted(cumulative_BV, uniforms_B1 * cumulative_BV[:, -1:], right=True)[:, 0]
    for row in (places_B == probabilities_BV.shape[1]).nonzero()[:, 0].tolist():  # rounded up to the whole mass
        places_B[row] = probabilities_BV[row].nonzero()[-1, 0]
    return places_B


def _alternatives(logits_V: Tensor, params: SamplingParams) -> tuple[tuple[int, float], ...]:
    if params.num_logprobs == 0:
        return ()
    values, ids = logits_V.log_softmax(dim=-1).topk(min(params.num_logprobs, logits_V.numel()))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def score(logits_NV: Tensor, token_ids: Sequence[int], num_alternatives: int) -> list[ScoredToken]:
    """Score N tokens that are given, not drawn: one per row of `logits_NV`."""
    logits_NV = logits_NV[: len(token_ids)].float()
    own_N1 = logits_NV.gather(1, torch.tensor(token_ids, device=logits_NV.device)[:, None])
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    ranks = ((logits_NV > own_N1).sum(dim=-1) + 1).tolist()
    logprobs = (own_N1 - total_N1)[:, 0].tolist()
    values, ids = logits_NV.topk(min(num_alternatives, logits_NV.shape[1]), dim=-1)
    alternatives = zip(ids.tolist(), (values - total_N1).tolist(), strict=True)
    return [
        ScoredToken(token, logprob, rank, tuple(zip(others, their_logprobs, strict=True)))
        for token, logprob, rank, (others, their_logprobs) in zip(token_ids, logprobs, ranks, alternatives, strict=True)
    ]
