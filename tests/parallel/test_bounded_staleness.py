"""Late gradients over real gloo processes, against one process that simulates the delay by its definition."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distributed import run_distributed
from modelwright.core.config import ConfigError
from modelwright.parallel.gradient_sync import AllReduceSync
from modelwright.parallel.mesh import World, duplicate_group, single
from modelwright.parallel.strategies.config import AsyncUpdatesConfig
from modelwright.parallel.strategies.delayed import DelayedSync
from modelwright.train.optim.build import compensate, compensate_naive

EXACT = {"rtol": 1e-12, "atol": 1e-14}
PAYLOAD = 8 * (12 + 3 + 3)


NUM_STEPS, RATE, RANKS = 12, 0.05, 2


@dataclass(frozen=True)
class Case:
    delay: int
    strength: float = 0.0


CASES = {"next": Case(1), "late": Case(2), "compensated": Case(2, 10.0)}


def initial() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((4, 3), (3,), (3, 1))]


def share_of_gradient(weights: Sequence[Tensor], step: int, rank: int) -> list[Tensor]:
    """Rank's share of the gradient of a mean over 10 rows, 5 for each of two ranks."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = (torch.randn(5, width, generator=draw, dtype=torch.float64) for width in (4, 1))
    leaves = [weight.detach().clone().requires_grad_() for weight in weights]
    error = torch.tanh(inputs @ leaves[0] + leaves[1]) @ leaves[2] - targets
    return list(torch.autograd.grad(error.square().sum() / 10, leaves))


def train(world: World, weights: list[Tensor], state: dict, *, case: Case, first: int, last: int) -> tuple[dict, int]:
    """Make steps `first` to below `last` on the weights in place, from a transport's state; return the next state and
    the bytes sent."""
    made = DelayedSync(
        AllReduceSync(duplicate_group(world)),
        delay=case.delay,
        weights=weights,
        compensate=partial(compensate, strength=case.strength) if case.strength else None,
    )
    with closing(made) as transport:
        if state:
            transport.load_state_dict(state)
        for step in range(first, last):
            gradients = share_of_gradient(weights, step, world.rank)
            transport.reduce(gradients)
            world.sums([1.0])  # a collective of the loop's, beside those in the thread
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= RATE * gradient
        return transport.state_dict(), transport.bytes_sent


def train_whole_and_cut(world: World, folder: Path) -> dict[str, dict[str, list]]:
    """Train in every case in one go, and cut off and continued from the saved state; by case."""
    results = {}
    for name, case in CASES.items():
        whole, cut = initial(), initial()
        _, sent = train(world, whole, {}, case=case, first=0, last=NUM_STEPS)
        state, sent_before = train(world, cut, {}, case=case, first=0, last=5)
        torch.save((cut, state), folder / f"state-{world.rank}.pt")
        cut, state = torch.load(folder / f"state-{world.rank}.pt")
        _, sent_after = train(world, cut, state, case=case, first=5, last=NUM_STEPS)
        results[name] = {"whole": whole, "cut": cut, "sent": [sent, sent_before, sent_after]}
    return results


def simulate(*, delay: int, strength: float = 0.0, num_steps: int = 0) -> list[Tensor]:
    """Delayed gradient descent by its definition: step t applies the whole batch's gradient of step t - delay."""
    weights, history = initial(), []
    for step in range(num_steps or NUM_STEPS):
        parts = [share_of_gradient(weights, step, rank) for rank in range(RANKS)]
        then = [weight.clone() for weight in weights]
        history.append(([sum(shares) for shares in zip(*parts, strict=True)], then))
        if step >= delay:
            gradients, then = history[step - delay]
            if strength:
                compensate_naive(gradients, weights, then, strength=strength)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= RATE * gradient
    return weights


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_distributed(train_whole_and_cut, RANKS, tmp_path_factory.mktemp("stale"))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_follow_the_definition_in_float64(two_ranks, case):
    delay, strength = CASES[case].delay, CASES[case].strength
    expected = simulate(delay=delay, strength=strength)
    for first, second, weight in zip(*(rank[case]["whole"] for rank in two_ranks), expected, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, weight, **EXACT)
    one_off = simulate(delay=delay - 1, strength=strength)
    assert furthest(expected, one_off) > 1e-4
    if strength:
        assert furthest(expected, simulate(delay=delay)) > 1e-4


def test_bytes_are_those_of_the_sums_that_arrived(two_ranks):
    for rank in two_ranks:
        for name, case in CASES.items():
            whole, before, after = rank[name]["sent"]
            assert whole == (NUM_STEPS - case.delay) * PAYLOAD
            assert before == (5 - case.delay) * PAYLOAD
            assert after == (NUM_STEPS - 5 - case.delay) * PAYLOAD


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_cut_off_ends_with_the_same_bits(two_ranks, case):
    for rank in two_ranks:
        assert all(map(torch.equal, rank[case]["whole"], rank[case]["cut"]))


def furthest(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_state_of_another_delay_begins_anew():
    gradient = torch.ones(3)
    with closing(DelayedSync(AllReduceSync(single()), delay=2)) as two:
        two.reduce([gradient])
        assert torch.equal(gradient, torch.zeros(3))
        two.reduce([torch.full((3,), 2.0)])
        state = two.state_dict()
    with closing(DelayedSync(AllReduceSync(single()), delay=1)) as one:
        one.load_state_dict(state)
        gradient = torch.full((3,), 5.0)
        one.reduce([gradient])
        assert torch.equal(gradient, torch.zeros(3))
        one.reduce([gradient])
        assert torch.equal(gradient, torch.full((3,), 5.0))


def test_an_error_in_the_thread_reaches_the_loop():
    class Broken(AllReduceSync):
        def reduce(self, gradients):
            raise RuntimeError("connection closed")

    with closing(DelayedSync(Broken(single()), delay=1)) as late:
        late.reduce([torch.ones(1)])
        with pytest.raises(RuntimeError, match="connection closed"):
            late.reduce([torch.ones(1)])


@pytest.mark.parametrize(("name", "value"), [("delay_steps", 0), ("delay_compensation", -1.0)])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}: must "):
        AsyncUpdatesConfig(mode="delayed", **{name: value})
