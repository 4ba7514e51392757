"""Chooses the next token of every row of logits, and scores given tokens.

A row's choice depends on its logits, its parameters and its own random number, never on the other rows.

Legend: B rows, N rows of a prompt, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelwright.infer.sequence import SamplingParams, ScoredToken
from modelwright.ops.decode_step import Draw, drawn, summarized

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
    """Settings and state that choose one row's token: parameters, index of the new token, counts of the new tokens so
    far, the prompt, and the tokens that a constraint allows, boolean [V]; None allows all.
    """

    params: SamplingParams
    step: int
    counts: Mapping[int, int]
    prompt_ids: Sequence[int] = ()
    allowed_V: Tensor | None = None


def sample(logits_BV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """Draws one token for each row of `logits_BV`."""
    logits_BV = logits_BV.float()
    scores_BV = _scores(logits_BV, requests)
    tokens, log_sums_B = summarized(logits_BV)
    if scores_BV is not logits_BV:
        tokens = scores_BV.argmax(dim=-1)
    draws = [
        Draw(row, params.temperature, params.top_k, params.top_p, params.min_p, params.uniform(request.step))
        for row, request in enumerate(requests)
        if (params := request.params).temperature > 0
    ]
    if draws:
        found = drawn(scores_BV, draws)
        if found is None:
            found = drawn_naive(scores_BV, draws)
        tokens[[draw.row for draw in draws]] = torch.tensor(found, device=tokens.device)
    # Log-probabilities and alternatives are of the model, from the logits before penalties and temperature.
    chosen_B = logits_BV.gather(1, tokens[:, None])[:, 0] - log_sums_B
    samples: list[SampledToken] = []
    for row, (token, logprob) in enumerate(zip(tokens.tolist(), chosen_B.tolist(), strict=True)):
        alternatives: tuple[tuple[int, float], ...] = ()
        if num_logprobs := requests[row].params.num_logprobs:
            values, ids = logits_BV[row].log_softmax(dim=-1).topk(min(num_logprobs, logits_BV.shape[1]))
            alternatives = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        samples.append(SampledToken(token, logprob, alternatives))
    return samples


def drawn_naive(scores_BV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The definition: the reference for `drawn`, and what draws on CUDA and without kernels."""
    tokens = dict[int, int]()
    whole = [draw for draw in draws if not draw.truncates]
    if whole:
        # Rows that draw from all tokens share one pass.
        temperatures_B1 = scores_BV.new_tensor([draw.divisor for draw in whole])[:, None]
        probabilities_BV = (scores_BV[[draw.row for draw in whole]] / temperatures_B1).softmax(dim=-1)
        found = _invert(probabilities_BV, [draw.uniform for draw in whole]).tolist()
        tokens |= zip((draw.row for draw in whole), found, strict=True)
    for draw in draws:
        if draw.truncates:
            tokens[draw.row] = _draw(scores_BV[draw.row], draw)
    return [tokens[draw.row] for draw in draws]


def _scores(logits_BV: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """Logits after constraints, biases and penalties, [B, V]; `logits_BV` itself if no request changes them. The order
    is vLLM's, so that settings mean the same.
    """
    scores_BV = logits_BV
    for row, request in enumerate(requests):
        params, counts = request.params, request.counts
        bans_stop = request.step < params.min_tokens and bool(params.stop_ids)
        has_earlier = bool(counts) and bool(params.presence_penalty or params.frequency_penalty)
        has_penalties = has_earlier or params.repetition_penalty != 1
        if not (has_penalties or bans_stop or params.logit_bias or request.allowed_V is not None):
            continue
        if scores_BV is logits_BV:
            scores_BV = logits_BV.clone()
        scores_V = scores_BV[row]
        if request.allowed_V is not None:
            scores_V.masked_fill_(~request.allowed_V.to(scores_V.device), -torch.inf)
        for token, bias in params.logit_bias:
            scores_V[token] += bias
        if bans_stop:
            scores_V[list(params.stop_ids)] = -torch.inf
        if params.repetition_penalty != 1:
            # Sorted, so that the result does not depend on the order of a set.
            ids = torch.tensor(sorted({*request.prompt_ids, *counts}), dtype=torch.long, device=scores_V.device)
            earlier, penalty = scores_V[ids], params.repetition_penalty
            scores_V[ids] = torch.where(earlier > 0, earlier / penalty, earlier * penalty)
        if has_earlier:
            ids = torch.tensor(list(counts), device=scores_V.device)
            occurrences = torch.tensor(list(counts.values()), dtype=scores_V.dtype, device=scores_V.device)
            scores_V[ids] -= params.presence_penalty + params.frequency_penalty * occurrences
    return scores_BV


def _draw(scores_V: Tensor, params: Draw) -> int:
    """Draws from the tokens that min-p, then top-k, then top-p keep, in ascending order of their ids."""
    uniform = params.uniform
    probabilities_V = (scores_V / params.divisor).softmax(dim=-1)
    if params.min_p:
        probabilities_V = probabilities_V.where(probabilities_V >= params.min_p * probabilities_V.max(), 0.0)
    if not params.top_k and params.top_p >= 1:
        return int(_invert(probabilities_V[None], [uniform]))
    limit = min(params.top_k or probabilities_V.numel(), probabilities_V.numel())
    probe = min(limit, NUCLEUS_PROBE) if params.top_p < 1 else limit
    values, ids = probabilities_V.topk(probe)
    if params.top_p < 1:
        # The nucleus is a share of the mass that top-k and min-p have left, which is 1 if they cut nothing.
        is_cut = limit < probabilities_V.numel() or params.min_p > 0
        target = params.top_p * (float(probabilities_V.topk(limit).values.sum()) if is_cut else 1.0)
        if probe < limit and float(values.double().sum()) < target:
            values, ids = probabilities_V.topk(limit)
        # A token stays if the mass before it is below the target, so the one that crosses it is kept, too.
        before = values.double().cumsum(0) - values
        ids = ids[: max(1, int((before < target).sum()))]
    ids = ids.sort().values
    return int(ids[_invert(probabilities_V[ids][None], [uniform])])


def _invert(probabilities_BV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Inverse CDF sampling: returns the place in each row, int64 [B], that a number from [0, 1) falls on."""
    cumulative_BV = probabilities_BV.double().cumsum(1)
    uniforms_B1 = torch.tensor(uniforms, dtype=torch.float64, device=probabilities_BV.device)[:, None]
    places_B = torch.searchsorted(cumulative_BV, uniforms_B1 * cumulative_BV[:, -1:], right=True)[:, 0]
    for row in (places_B == probabilities_BV.shape[1]).nonzero()[:, 0].tolist():  # rounded up to the whole mass
        places_B[row] = probabilities_BV[row].nonzero()[-1, 0]
    return places_B


def score(logits_NV: Tensor, token_ids: Sequence[int], num_alternatives: int) -> list[ScoredToken]:
    """Scores N given tokens, one for each row of `logits_NV`."""
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
