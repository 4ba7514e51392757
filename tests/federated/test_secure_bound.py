"""The largest norm of a secure sum of honest clients: reached without noise, and with noise where chance has it."""

import numpy as np
import pytest

from modelwright.core.config import parse
from modelwright.core.errors import ModelwrightError
from modelwright.federated import secure_bound
from modelwright.federated.config import FederatedConfig
from modelwright.federated.fixed_point import decode, encode
from modelwright.federated.secure_bound import check_sum, largest_norm


def settings(*, fraction_bits: int = 24, **privacy: float) -> FederatedConfig:
    secure = {"enabled": True, "threshold": 2, "fraction_bits": fraction_bits}
    return parse(FederatedConfig, {"secure_sum": secure, "privacy": {"clip_norm": 0.5, **privacy}})


@pytest.mark.parametrize("fraction_bits", [8, 24])
def test_equal_updates_of_full_length_pass_and_longer_ones_do_not(fraction_bits: int) -> None:
    """With 8 binary digits rounding adds much to the norm of 10,000 numbers."""
    config, weights, size = settings(fraction_bits=fraction_bits), (3.0, 1.0, 7.0), 10_000
    half_steps = np.full(size, 0.5 / np.sqrt(size))
    terms = [encode(np.append(half_steps * one, one), fraction_bits=fraction_bits, num_terms=3) for one in weights]
    total = decode(np.sum(terms, axis=0, dtype=np.uint64), fraction_bits=fraction_bits)
    check_sum(total[:-1], config, clients=["a", "b", "c"], weight=total[-1])
    bound = largest_norm(config, num_clients=3, size=size, weight=11.0)
    assert bound == pytest.approx(11.0 * 0.5, rel=1e-4 if fraction_bits == 24 else 0.15)
    with pytest.raises(ModelwrightError, match=r"above the .* within privacy\.clip_norm \(0\.5\)"):
        check_sum(half_steps * 11.0 * 1.2, config, clients=["a", "b", "c"], weight=11.0)
    with pytest.raises(ModelwrightError, match="count for nothing"):
        check_sum(half_steps, config, clients=["a", "b", "c"], weight=0.0)


@pytest.mark.parametrize("size", [1, 300])
def test_noise_exceeds_the_bound_as_seldom_as_it_says(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a probability that draws can show: a bound that is exceeded more often would refuse honest rounds."""
    monkeypatch.setattr(secure_bound, "HONEST_REFUSED", 0.05)
    config, draw = settings(noise_multiplier=1.5), np.random.default_rng(7)
    total = np.zeros(size)
    total[0] = 3 * 0.5
    std = 1.5 * 0.5 / np.sqrt(2) * np.sqrt(3)
    norms = np.linalg.norm(total + draw.normal(0.0, std, (4000, size)), axis=1)
    bound = largest_norm(config, num_clients=3, size=size, weight=3.0)
    assert np.mean(norms > bound) < 0.05
    assert bound < 3 * np.median(norms)  # and it still says something
