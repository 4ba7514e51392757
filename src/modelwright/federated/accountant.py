"""The privacy loss of a training with Gaussian noise and sampled clients, by Rényi differential privacy (Mironov 2017).

Each round a client takes part with probability q, and noise of z times the clipping norm is added to the sum. RDP of
the sampled Gaussian mechanism at whole orders: Mironov, Talwar and Zhang 2019, section 3.3; between whole orders the
logarithm of the moment is convex, so a straight line bounds it from above. Conversion to (epsilon, delta): Canonne,
Kamath and Steinke 2020, proposition 12.
"""

import math
from collections.abc import Sequence

from modelwright.core.errors import ConfigError

ORDERS = (*(1 + number / 20 for number in range(1, 200)), *range(11, 128), *range(128, 1024, 8))


def epsilon(*, sampling_rate: float, noise_multiplier: float, num_rounds: int, delta: float) -> float:
    """The epsilon of all rounds together; infinite without noise, 0 before the first round."""
    if not 0 < sampling_rate <= 1:
        raise ConfigError(f"sampling_rate: must be above 0 and at most 1, got {sampling_rate}")
    if not num_rounds:
        return 0.0
    if not noise_multiplier:
        return math.inf
    losses = [num_rounds * rdp(order, sampling_rate, noise_multiplier) for order in ORDERS]
    return _smallest(losses, delta)


def rdp(order: float, sampling_rate: float, noise_multiplier: float) -> float:
    """Rényi differential privacy of one round at an order above 1."""
    if sampling_rate == 1:
        return order / (2 * noise_multiplier**2)
    below = math.floor(order)
    part = order - below
    moment = _log_moment(below, sampling_rate, noise_multiplier)
    if part:
        moment += part * (_log_moment(below + 1, sampling_rate, noise_multiplier) - moment)
    return moment / (order - 1)


def _log_moment(order: int, rate: float, noise: float) -> float:
    """The logarithm of the moment at a whole order, 0 at order 1."""
    if order == 1:
        return 0.0
    terms = [
        math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        + k * math.log(rate) + (order - k) * math.log1p(-rate) + (k * k - k) / (2 * noise**2)
        for k in range(order + 1)
    ]  # fmt: skip
    largest = max(terms)
    return largest + math.log(sum(math.exp(term - largest) for term in terms))


def _smallest(losses: Sequence[float], delta: float) -> float:
    """The smallest epsilon over all orders."""
    bounds = [
        loss + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order, loss in zip(ORDERS, losses, strict=True)
    ]
    return max(0.0, min(bounds))
