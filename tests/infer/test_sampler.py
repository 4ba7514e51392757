"""The sampler: distributions, top-k, top-p, penalties, seeds."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from modelwright.infer.sampler import SampleRequest, sample
from modelwright.infer.sequence import SamplingParams

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))


def frequencies(params: SamplingParams, draws: int = 1500) -> dict[int, float]:
    requests = [SampleRequest(replace(params, seed=seed), 0, {}) for seed in range(draws)]
    counts = Counter(draw.token_id for draw in sample(LOGITS.expand(draws, -1), requests))
    return {token: count / draws for token, count in sorted(counts.items())}


def test_plain_sampling_has_the_models_distribution():
    assert frequencies(SamplingParams()) == pytest.approx({0: 0.5, 1: 0.25, 2: 0.15, 3: 0.07, 4: 0.03}, abs=0.05)


def test_temperature_sharpens():
    weights = LOGITS.exp() ** 2
    expected = dict(enumerate((weights / weights.sum()).tolist()))
    found = frequencies(SamplingParams(temperature=0.5))
    assert all(found.get(token, 0.0) == pytest.approx(share, abs=0.05) for token, share in expected.items())


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
    kept = {draw.token_id for draw in sample(flat.expand(1200, -1), requests)}
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
