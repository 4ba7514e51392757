"""The controller: its probabilities, its gradient, and that rewards move it."""

import itertools
import math

import pytest
import torch

from modelwright_search.space import Axis
from modelwright_search.strategies import reinforce
from modelwright_search.strategies.reinforce import Reinforce, reward_of

AXES = [Axis("a", (1, 2, 3), is_ordered=True), Axis("b", ("x", "y"), is_ordered=False)]


def test_the_probabilities_of_all_choices_add_up_to_one() -> None:
    controller = Reinforce(AXES, seed=3).controller
    places = list(itertools.product(range(3), range(2)))
    assert sum(controller.log_prob(one).exp().item() for one in places) == pytest.approx(1.0, abs=1e-5)


def test_the_second_value_depends_on_the_first() -> None:
    controller = Reinforce(AXES, seed=3).controller
    assert not torch.equal(controller.log_probs([0])[1], controller.log_probs([2])[1])


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    draws = [[Reinforce(AXES, seed).draw() for _ in range(1)] for seed in (5, 5)]
    assert draws[0] == draws[1]
    first, second = Reinforce(AXES, 5), Reinforce(AXES, 6)
    assert [first.draw() for _ in range(20)] != [second.draw() for _ in range(20)]


def test_the_gradient_is_that_of_the_expected_reward() -> None:
    """Weighted by their probabilities, the gradients of all choices are those of the expectation, with any baseline."""
    rewards = {places: float(sum(places)) + 0.5 for places in itertools.product(range(3), range(2))}
    learner = Reinforce(AXES, seed=1)
    controller = learner.controller
    expected = torch.stack([controller.log_prob(one).exp() * reward for one, reward in rewards.items()]).sum()
    exact = torch.autograd.grad(expected, list(controller.parameters()), allow_unused=True)
    sums = [torch.zeros_like(parameter) for parameter in controller.parameters()]
    learner.optimizer = torch.optim.SGD(controller.parameters(), lr=0.0)
    for places, reward in rewards.items():
        learner.baseline, learner.num_rewards = 0.7, 1
        learner.learn(places, reward)
        share = controller.log_prob(places).exp().item()
        for total, parameter in zip(sums, controller.parameters(), strict=True):
            if parameter.grad is not None:
                total -= share * parameter.grad  # of the loss, which is the negative
    for total, gradient in zip(sums, exact, strict=True):
        torch.testing.assert_close(
            total, torch.zeros_like(total) if gradient is None else gradient, rtol=1e-4, atol=1e-6
        )


def test_rewards_raise_the_probability_of_what_earns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reinforce, "LEARNING_RATE", 0.01)
    learner = Reinforce(AXES, seed=2)
    before = learner.controller.log_prob([2, 1]).exp().item()
    for _ in range(120):
        places = learner.draw()
        learner.learn(places, 1.0 if places == [2, 1] else 0.0)
    assert before < 0.25
    assert learner.controller.log_prob([2, 1]).exp().item() > 0.6


def test_the_reward_is_that_of_the_paper() -> None:
    assert reward_of(math.log(40.0)) == pytest.approx(80.0 / 40.0**2)
    assert reward_of(None) == 0.0
