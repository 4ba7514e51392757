"""The sampler: distributions, top-k, top-p, penalties, seeds."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch

from modelwright.infer.sampler import SampleRequest, sample, score
from modelwright.infer.sequence import SamplingParams
from modelwright.ops import cpu_kernels


@pytest.fixture(autouse=True, params=["decode_step", "0"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with the kernel and with PyTorch's operators."""
    if request.param != "0" and not cpu_kernels.instruction_set():
        pytest.skip("there are no kernels here")
    monkeypatch.setenv(cpu_kernels.SWITCH, request.param)


LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))


def frequencies(params: SamplingParams, draws: int = 1500) -> dict[int, float]:
    requests = [SampleRequest(replace(params, seed=seed), 0, {}) for seed in range(draws)]
    counts = Counter(draw.token_id for draw in sample(LOGITS.repeat(draws, 1), requests))
    return {token: count / draws for token, count in sorted(counts.items())}


def test_plain_sampling_has_the_models_distribution():
    assert frequencies(SamplingParams()) == pytest.approx({0: 0.5, 1: 0.25, 2: 0.15, 3: 0.07, 4: 0.03}, abs=0.05)


def test_temperature_sharpens():
    weights = LOGITS.exp() ** 2
    expected = dict(enumerate((weights / weights.sum()).tolist()))
    found = frequencies(SamplingParams(temperature=0.5))
    assert all(found.get(token, 0.0) == pytest.approx(share, abs=0.05) for token, share in expected.items())


@pytest.mark.slow
def test_top_k_and_top_p_keep_the_right_tokens():
    assert frequencies(SamplingParams(top_k=2)) == pytest.approx({0: 2 / 3, 1: 1 / 3}, abs=0.05)
    assert set(frequencies(SamplingParams(top_p=0.6))) == {0, 1}
    assert set(frequencies(SamplingParams(top_p=0.5))) == {0}
    assert set(frequencies(SamplingParams(top_p=0.76))) == {0, 1, 2}
    assert set(frequencies(SamplingParams(top_k=3, top_p=0.8))) == {0, 1}


def test_top_p_past_the_probe_equals_a_full_sort():
    flat = torch.zeros(1000)
    params = SamplingParams(top_p=0.5)
    requests = [SampleRequest(replace(params, seed=seed), 0, {}) for seed in range(1200)]
    kept = {draw.token_id for draw in sample(flat.repeat(1200, 1), requests)}
    assert 400 < len(kept) <= 500


def test_greedy_logprobs_and_alternatives():
    params = SamplingParams(temperature=0.0, num_logprobs=3)
    (draw,) = sample(LOGITS[None], [SampleRequest(params, 0, {})])
    assert draw.token_id == 0
    assert draw.logprob == pytest.approx(-0.6931, abs=1e-4)
    assert [token for token, _ in draw.alternatives] == [0, 1, 2]


def test_penalties_move_away_from_earlier_tokens():
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    assert sample(LOGITS[None], [SampleRequest(params, 3, {0: 1})])[0].token_id == 0
    assert sample(LOGITS[None], [SampleRequest(params, 3, {0: 2})])[0].token_id == 1
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    assert sample(LOGITS[None], [SampleRequest(params, 3, {0: 1})])[0].token_id == 1


def test_same_seed_same_token_whatever_the_other_rows():
    params = SamplingParams(seed=11)
    one = [sample(LOGITS[None], [SampleRequest(params, step, {})])[0] for step in range(50)]
    many = [
        sample(
            LOGITS.expand(3, -1),
            [SampleRequest(p, step, {}) for p in (SamplingParams(seed=1), params, SamplingParams(top_k=1))],
        )[1]
        for step in range(50)
    ]
    assert one == many
    assert len({draw.token_id for draw in one}) > 1


def written_out(logits: Sequence[float], request: SampleRequest) -> dict[int, float]:
    """The probabilities of the tokens that may come next, number by number."""
    params, scores = request.params, dict(enumerate(logits))
    if request.allowed_V is not None:
        scores = {token: score for token, score in scores.items() if request.allowed_V[token]}
    for token, bias in params.logit_bias:
        if token in scores:
            scores[token] += bias
    if request.step < params.min_tokens:
        scores = {token: score for token, score in scores.items() if token not in params.stop_ids}
    for token in set(request.prompt_ids) | set(request.counts):
        if token in scores:
            is_positive = scores[token] > 0
            factor = 1 / params.repetition_penalty if is_positive else params.repetition_penalty
            scores[token] *= factor
    for token, count in request.counts.items():
        if token in scores:
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
    if params.temperature == 0:
        return {max(scores, key=lambda token: scores[token]): 1.0}
    highest = max(scores.values())
    weights = {token: math.exp((score - highest) / params.temperature) for token, score in scores.items()}
    total = sum(weights.values())
    shares = {token: weight / total for token, weight in weights.items()}
    shares = {token: share for token, share in shares.items() if share >= params.min_p * max(shares.values())}
    ranked = sorted(shares, key=lambda token: -shares[token])[: params.top_k or len(shares)]
    target, mass, kept = params.top_p * sum(shares[token] for token in ranked), 0.0, []
    for token in ranked:
        if mass >= target:
            break
        kept.append(token)
        mass += shares[token]
    return {token: shares[token] / mass for token in sorted(kept)}


def one_request(draw: random.Random) -> SampleRequest:
    """Random settings: each of them is off half of the time."""

    def maybe(value, neutral):
        return value if draw.random() < 0.5 else neutral

    params = SamplingParams(
        max_tokens=9,
        temperature=maybe(draw.uniform(0.3, 2), draw.choice([0.0, 1.0])),
        top_p=maybe(draw.uniform(0.1, 1), 1.0),
        top_k=maybe(draw.randint(1, 12), 0),
        min_p=maybe(draw.uniform(0, 0.9), 0.0),
        seed=draw.randrange(10**6),
        stop_ids=tuple(draw.sample(range(17), 3)),
        min_tokens=maybe(4, 0),
        logit_bias=maybe(tuple((token, draw.uniform(-9, 9)) for token in draw.sample(range(17), 4)), ()),
        presence_penalty=maybe(draw.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(draw.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(draw.uniform(0.5, 2), 1.0),
    )
    counts = maybe({token: draw.randint(1, 3) for token in draw.sample(range(17), 4)}, {})
    prompt_ids = [draw.randrange(17) for _ in range(5)]
    mask = torch.tensor([draw.random() < 0.7 for _ in range(17)])
    mask[next(token for token in range(17) if token not in params.stop_ids)] = True
    return SampleRequest(params, draw.randrange(8), counts, prompt_ids, maybe(mask, None))


def test_every_setting_together_equals_the_definition_written_out():
    draw = random.Random(0)
    for _ in range(300):
        requests = [one_request(draw) for _ in range(3)]
        logits = torch.tensor([[draw.gauss(0, 2) for _ in range(17)] for _ in requests])
        together = sample(logits, requests)
        for row, request in enumerate(requests):
            shares = written_out(logits[row].tolist(), request)
            target, cumulative = request.params.uniform(request.step), 0.0
            for token, share in shares.items():
                cumulative += share
                if abs(cumulative - target) < 1e-5:
                    break  # on the boundary, rounding decides
                if target < cumulative:
                    assert together[row].token_id == token, request
                    break
            assert together[row] == sample(logits[row : row + 1], [request])[0]


def test_each_setting_changes_the_distribution_as_defined():
    settings = [
        {"min_p": 0.4}, {"min_p": 0.4, "top_p": 0.9}, {"logit_bias": ((4, 3.0), (0, -2.0))},
        {"repetition_penalty": 1.8}, {"stop_ids": (0, 1), "min_tokens": 1}, {"top_k": 3, "min_p": 0.2},
    ]  # fmt: skip
    for setting in settings:
        params = SamplingParams(**setting)
        requests = [SampleRequest(replace(params, seed=seed), 0, {1: 2}, [0, 2]) for seed in range(1500)]
        counts = Counter(draw.token_id for draw in sample(LOGITS.expand(1500, -1), requests))
        expected = written_out(LOGITS.tolist(), requests[0])
        found = {token: count / 1500 for token, count in counts.items()}
        assert found.keys() <= expected.keys()
        assert all(found.get(token, 0.0) == pytest.approx(share, abs=0.05) for token, share in expected.items())


def test_given_tokens_are_scored_as_by_a_plain_softmax():
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    ids = [3, 0, 10, 5]
    for row, scored in enumerate(score(logits, ids, 3)):
        logprobs = logits[row].log_softmax(dim=-1).tolist()
        ranked = sorted(range(11), key=lambda token: -logprobs[token])
        assert scored.token_id == ids[row]
        assert scored.logprob == pytest.approx(logprobs[ids[row]], abs=1e-5)
        assert scored.rank == ranked.index(ids[row]) + 1
        assert [token for token, _ in scored.alternatives] == ranked[:3]


def test_draws_together_are_those_of_each_row_alone() -> None:
    """And those of the walk through the tokens, written out."""
    draw = torch.Generator().manual_seed(2)
    logits_BV = 3 * torch.randn(24, 300, generator=draw)
    params = [SamplingParams(seed=row, temperature=(0.6, 1.0, 1.7)[row % 3]) for row in range(24)]
    params[5] = replace(params[5], top_p=0.5)
    params[9] = replace(params[9], temperature=0.0)
    requests = [SampleRequest(one, 7, {}) for one in params]
    together = sample(logits_BV, requests)
    for row, request in enumerate(requests):
        assert sample(logits_BV[row : row + 1], [request]) == [together[row]]
        if request.params.temperature and request.params.top_p == 1:
            probabilities = (logits_BV[row] / request.params.temperature).softmax(0).double()
            walked, mass = 0, float(probabilities[0])
            while mass <= request.params.uniform(7) * float(probabilities.sum()):
                walked += 1
                mass += float(probabilities[walked])
            assert together[row].token_id == walked


def test_a_draw_never_takes_a_token_without_mass() -> None:
    """Also where a target at the very end of the mass is past what the sum reaches."""
    logits_BV = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    with mock.patch.object(SamplingParams, "uniform", return_value=1.0):
        drawn = sample(logits_BV, [SampleRequest(SamplingParams(), 0, {})] * 2)
    assert [one.token_id for one in drawn] == [1, 0]
