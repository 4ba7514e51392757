"""Late gradients over real gloo processes, against one process that simulates the delay by its definition."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.optim.delay import compensate_naive
from modelwright.parallel.gradient_sync import ExactTransport
from modelwright.parallel.mesh import single
from modelwright.parallel.strategies.delayed import DelayedTransport, StalenessConfig
from parallel import stale_ranks as stale
from rank_processes import run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-14}
SCRIPT = Path(stale.__file__)
PAYLOAD = 8 * (12 + 3 + 3)


def simulate(*, delay: int, strength: float = 0.0, num_steps: int = 0) -> list[Tensor]:
    """Delayed gradient descent by its definition: step t applies the whole batch's gradient of step t - delay."""
    weights, history = stale.initial(), []
    for step in range(num_steps or stale.NUM_STEPS):
        parts = [stale.share_of_gradient(weights, step, rank) for rank in range(stale.RANKS)]
        then = [weight.clone() for weight in weights]
        history.append(([sum(shares) for shares in zip(*parts, strict=True)], then))
        if step >= delay:
            gradients, then = history[step - delay]
            if strength:
                compensate_naive(gradients, weights, then, strength=strength)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= stale.RATE * gradient
    return weights


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """For each case the weights of both ranks, from one go and from two; and the bytes that each rank sent."""
    folder = tmp_path_factory.mktemp("stale")
    outputs = run_ranks(SCRIPT, folder, size=2)
    weights = {case: [torch.load(folder / f"{case}-rank{rank}.pt") for rank in range(2)] for case in stale.CASES}
    return weights, [list(map(int, output.split())) for output in outputs]


@pytest.mark.parametrize("case", ["exact", "late", "compensated"])
def test_two_ranks_follow_the_definition_in_float64(two_ranks, case):
    delay, strength = stale.CASES[case].delay, stale.CASES[case].strength
    expected = simulate(delay=delay, strength=strength)
    for first, second, weight in zip(*(rank["whole"] for rank in two_ranks[0][case]), expected, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, weight, **EXACT)
    one_off = simulate(delay=1 if delay == 0 else delay - 1, strength=strength)
    assert furthest(expected, one_off) > 1e-4
    if strength:
        assert furthest(expected, simulate(delay=delay)) > 1e-4


def test_bytes_are_those_of_the_sums_that_arrived(two_ranks):
    for sent in two_ranks[1]:
        for (whole, before, after), case in zip(batched(sent, 3), stale.CASES.values(), strict=True):
            assert whole == (stale.NUM_STEPS - case.delay) * PAYLOAD
            assert before == (5 - case.delay) * PAYLOAD
            assert after == (stale.NUM_STEPS - 5 - case.delay) * PAYLOAD


@pytest.mark.parametrize("case", ["exact", "late", "compensated"])
def test_a_run_that_was_cut_off_ends_with_the_same_bits(two_ranks, case):
    for rank in two_ranks[0][case]:
        assert all(map(torch.equal, rank["whole"], rank["cut"]))


def furthest(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def batched(values: list[int], size: int) -> list[list[int]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def test_without_delay_it_is_the_inner_transport_bit_for_bit():
    draw = torch.Generator().manual_seed(0)
    first = [torch.randn(50, generator=draw), torch.randn(3, 4, generator=draw)]
    second = [tensor.clone() for tensor in first]

    class Halve(ExactTransport):
        def reduce(self, gradients):
            for gradient in gradients:
                gradient /= 3
            self.bytes_sent += 7

    plain, late = Halve(single()), DelayedTransport(Halve(single()), StalenessConfig())
    with late:
        for _ in range(3):
            plain.reduce(first)
            late.reduce(second)
            assert all(map(torch.equal, first, second))
    assert late.bytes_sent == plain.bytes_sent == 21


def test_state_of_another_delay_begins_anew():
    gradient = torch.ones(3)
    with DelayedTransport(ExactTransport(single()), StalenessConfig(delay=2)) as two:
        two.reduce([gradient])
        assert torch.equal(gradient, torch.zeros(3))
        two.reduce([torch.full((3,), 2.0)])
        state = two.state_dict()
    with DelayedTransport(ExactTransport(single()), StalenessConfig(delay=1)) as one:
        one.load_state_dict(state)
        gradient = torch.full((3,), 5.0)
        one.reduce([gradient])
        assert torch.equal(gradient, torch.zeros(3))
        one.reduce([gradient])
        assert torch.equal(gradient, torch.full((3,), 5.0))


def test_an_error_in_the_thread_reaches_the_loop():
    class Broken(ExactTransport):
        def reduce(self, gradients):
            raise RuntimeError("connection closed")

    with DelayedTransport(Broken(single()), StalenessConfig(delay=1)) as late:
        late.reduce([torch.ones(1)])
        with pytest.raises(RuntimeError, match="connection closed"):
            late.reduce([torch.ones(1)])


def test_a_negative_delay_is_refused():
    with pytest.raises(ConfigError, match=r"^delay: must not be negative"):
        StalenessConfig(delay=-1)
