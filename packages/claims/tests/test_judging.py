"""The rule that all claims share: missed before lacking before met, and margins by their bounds."""

import pytest

from modelwright_claims.claim import Claim, Measurement, Samples, Verdict, untestable
from modelwright_claims.judging import Judgment, judge, names_between
from modelwright_claims.statistics import estimate, exact

NEAR, FAR = estimate([1.9, 2.0, 2.1]), estimate([1.0, 2.0, 3.0])
"""The same mean; the bounds are 1.83 and 2.17, and 0.31 and 3.69."""


@pytest.mark.parametrize(("relation", "limit"), [(">=", 1.8), ("<=", 2.2), (">", 1.8), ("<", 2.2)])
def test_a_margin_is_judged_by_the_bound_and_not_by_the_mean(relation, limit):
    judgment = Judgment()
    assert judgment.check("speed", NEAR, limit, "x", relation)
    assert judgment.verdict().kind == "met"
    assert not judgment.check("speed", FAR, limit, "x", relation)
    assert judgment.verdict().kind == "short"


def test_a_miss_names_the_figure_its_bound_and_the_limit():
    judgment = Judgment(said=["beside"])
    judgment.check("loss", FAR, 2.5, " nats", "<=")
    assert judgment.verdict().reason == "loss 2 nats (upper bound 3.69 nats), not at most 2.5 nats. beside"


@pytest.mark.parametrize(("relation", "holds"), [(">=", True), ("<=", True), (">", False), ("<", False)])
def test_the_limit_itself(relation, holds):
    assert Judgment().check("bytes", exact(2.0), 2.0, "", relation) is holds


def test_an_exact_count_needs_no_repeats_and_says_so():
    judgment = Judgment()
    judgment.check("bytes", exact(3.0), 2.0, "", "<=")
    assert "bytes 3 (exact), not at most 2" in judgment.verdict().reason


def test_a_single_noisy_sample_is_no_exact_count():
    """A number without `exact` is one sample: inside its limit it proves nothing, outside it is a miss."""
    inside, outside, count = Judgment(), Judgment(), Judgment()
    inside.ask("error", 3.0, "%", "<=", 5.0)
    outside.ask("error", 6.0, "%", "<=", 5.0)
    count.ask("FLOPs", exact(3.0), "%", "<=", 5.0)
    assert [one.verdict().kind for one in (inside, outside, count)] == ["not judged", "short", "met"]
    assert (inside.figures["error"].exact, count.figures["FLOPs"].exact) == (None, True)


def test_one_repeat_inside_the_margin_is_not_judged_and_one_outside_is_short():
    inside, outside = Judgment(), Judgment()
    inside.check("speed", estimate([3.0]), 2.0, "x", ">=")
    outside.check("speed", estimate([1.0]), 2.0, "x", ">=")
    assert inside.verdict().kind == "not judged"
    assert "repeats of speed: one gives no bound" in inside.verdict().reason
    assert outside.verdict().kind == "short"
    assert "one repeat, no bound" in outside.verdict().reason


def claim(limit: float = 2.0) -> Claim:
    def rule(samples: Samples, conditions: object) -> Verdict:
        judgment = Judgment()
        judgment.check("speed", estimate(samples["speed"]), limit, "x", ">=")
        with judgment.part():
            judgment.check("loss", estimate(samples["loss"]), 1.0, "", "<=")
        with judgment.beside():
            judgment.figures["memory"] = estimate(samples["memory"]).figure("B")
        return judgment.verdict()

    texts = {"statement": "It is fast.", "source": "A", "published": "2x", "compared": "a and b", "target": "2x"}
    return Claim(name="fast", **texts, measure=lambda setting: Measurement(), judge=rule)  # type: ignore[arg-type]


def test_what_the_record_lacks_is_named_and_never_guessed():
    fast, slow = [3.0, 3.0], [1.0, 1.0]
    assert judge(claim(), Measurement(samples={"speed": fast, "loss": [0.5, 0.5]})).kind == "met"
    lacking = judge(claim(), Measurement(samples={"speed": fast}))
    assert (lacking.kind, lacking.reason) == ("not judged", "the record lacks samples 'loss'")
    assert judge(claim(), Measurement(samples={})).line == "not judged: the record lacks samples 'speed'"
    assert judge(claim(), Measurement(samples={"speed": slow})).kind == "short"  # a loss can make it no better
    assert judge(claim(), Measurement(samples={"speed": slow, "loss": [0.5, 0.5]})).kind == "short"


def test_figures_that_no_target_speaks_of_may_lack():
    samples = {"speed": [3.0, 3.0], "loss": [0.5, 0.5]}
    assert "memory" not in judge(claim(), Measurement(samples=samples)).figures
    assert judge(claim(), Measurement(samples=samples | {"memory": [1.0, 1.0]})).figures["memory"].value == 1.0


def test_a_machine_that_cannot_test_it_is_the_reason():
    assert judge(claim(), untestable("no network")).line == "cannot be tested here: no network"


def test_names_of_samples_are_read_back():
    samples = {"step, a, far": [1.0], "step, b, far": [1.0], "step, c": [1.0], "other": [1.0]}
    assert names_between(samples, "step, ") == ["a, far", "b, far", "c"]
    assert names_between(samples, "step, ", ", far") == ["a", "b"]
