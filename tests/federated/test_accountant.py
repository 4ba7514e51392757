"""Epsilon against `dp-accounting`."""

import math

import pytest

from modelwright.core.errors import ConfigError
from modelwright.federated.accountant import ORDERS, epsilon, rdp

REFERENCE = [
    (1.0, 1.0, 1, 1e-5, 4.728507067217623),
    (1.0, 4.0, 100, 1e-5, 14.132226163159334),
    (0.1, 1.1, 200, 1e-5, 9.250774980199122),
    (0.01, 0.8, 1000, 1e-6, 4.2934567460187125),
    (0.5, 2.0, 50, 1e-5, 10.28780809372872),
    (0.02, 5.0, 3000, 1e-7, 1.1184519337066061),
]
"""Sampling rate, noise multiplier, rounds, delta, and the epsilon of dp-accounting 0.6.0 (Google): `RdpAccountant` with
its default orders, `PoissonSampledDpEvent` of `GaussianDpEvent`, composed so many times."""


@pytest.mark.parametrize(("rate", "noise", "rounds", "delta", "expected"), REFERENCE)
def test_epsilon_is_that_of_dp_accounting(
    rate: float, noise: float, rounds: int, delta: float, expected: float
) -> None:
    found = epsilon(sampling_rate=rate, noise_multiplier=noise, num_rounds=rounds, delta=delta)
    assert found == pytest.approx(expected, rel=0.01)


def test_more_rounds_and_less_noise_lose_more() -> None:
    common = {"sampling_rate": 0.1, "delta": 1e-5}
    values = [epsilon(**common, noise_multiplier=1.0, num_rounds=n) for n in (0, 1, 10, 100)]
    assert values == sorted(values)
    assert values[0] == 0
    assert epsilon(**common, noise_multiplier=0.0, num_rounds=1) == math.inf
    assert epsilon(**common, noise_multiplier=0.5, num_rounds=9) > epsilon(**common, noise_multiplier=2.0, num_rounds=9)
    with pytest.raises(ConfigError, match="sampling_rate"):
        epsilon(sampling_rate=0.0, noise_multiplier=1.0, num_rounds=1, delta=1e-5)


def test_sampling_everyone_is_the_gaussian_mechanism() -> None:
    for order in ORDERS[::20]:
        assert rdp(order, 1.0, 2.0) == pytest.approx(order / 8)
        assert rdp(order, 1 - 1e-12, 2.0) >= order / 8 * 0.999  # the line between whole orders lies above
