"""Differences of two models: the bootstrap against its definition, and what is compared by tokens and what by bytes."""

import math

import numpy as np
import pytest

from modelwright.evaluate.scoring import RecordScores, compare_scores, perplexities


def scores(nats, *, tokens=None, correct=(), numbers=()) -> RecordScores:
    tokens = [10] * len(nats) if tokens is None else tokens
    answers = [
        {"id": str(place), "num_tokens": count, "num_bytes": 40, "nats": float(value)}
        for place, (value, count) in enumerate(zip(nats, tokens, strict=True))
    ]
    rows = [[{"id": str(n), "correct": bool(one)} for n, one in enumerate(ones)] for ones in (correct, numbers)]
    return RecordScores(answers=answers, choices=rows[0], numbers=rows[1])


def test_equal_models_differ_in_nothing() -> None:
    one = scores([3.0, 5.0, 8.0], correct=[1, 0, 1])
    measures = compare_scores(one, one, resamples=200, seed=0)
    assert [measure.name for measure in measures] == [
        "nats per token of answers",
        "bits per byte of answers",
        "multiple choice",
    ]
    assert {(m.difference, m.low, m.high, m.p_value, m.won, m.lost) for m in measures} == {(0.0, 0.0, 0.0, 1.0, 0, 0)}


def test_a_difference_in_every_record_is_beyond_doubt() -> None:
    base = np.random.default_rng(0).uniform(20, 60, 50)
    tokens, bits = compare_scores(scores(base), scores(base - 2.0), resamples=999, seed=0)
    assert tokens.difference == pytest.approx(-0.2)
    assert (tokens.low, tokens.high) == pytest.approx((-0.2, -0.2))
    assert tokens.p_value == pytest.approx(2 / 1000)
    assert bits.difference == pytest.approx(-2.0 / 40 / math.log(2))
    assert (tokens.won, tokens.lost, tokens.lower_is_better) == (50, 0, True)


def test_the_bootstrap_is_that_of_the_definition() -> None:
    draw = np.random.default_rng(1)
    base, other = draw.normal(30, 5, 80), draw.normal(30.3, 5, 80)
    (_, measure) = compare_scores(scores(base), scores(other), resamples=4000, seed=3)
    difference = (other - base) / math.log(2) / 40
    means = [difference[draw.integers(0, 80, 80)].mean() for _ in range(20_000)]
    low, high = np.quantile(means, [0.025, 0.975])
    assert (measure.low, measure.high) == pytest.approx((low, high), abs=0.006)
    share = min(np.mean(np.array(means) <= 0), np.mean(np.array(means) >= 0))
    assert measure.p_value == pytest.approx(2 * share, abs=0.03)


def test_other_tokens_are_compared_by_bytes_alone() -> None:
    measures = compare_scores(scores([3.0, 4.0]), scores([3.0, 4.0], tokens=[10, 12]), resamples=100, seed=0)
    assert [measure.name for measure in measures] == ["bits per byte of answers"]


def test_accuracy_counts_won_and_lost_records() -> None:
    first, second = scores([], numbers=[1, 1, 0, 0, 0]), scores([], numbers=[1, 0, 1, 1, 0])
    (measure,) = compare_scores(first, second, resamples=500, seed=0)
    assert (measure.name, measure.first, measure.second) == ("exact match of numbers", 0.4, 0.6)
    assert (measure.won, measure.lost, measure.num_records, measure.lower_is_better) == (2, 1, 5, False)
    assert 0.05 < measure.p_value <= 1.0
    assert math.isnan(perplexities(first))


def test_other_records_are_refused() -> None:
    with pytest.raises(ValueError, match="different records"):
        compare_scores(scores([3.0]), scores([3.0, 4.0]), resamples=100, seed=0)
