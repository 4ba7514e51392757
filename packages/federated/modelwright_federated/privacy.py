"""The privacy loss of rounds with Gaussian noise, and the size of the noise relative to the updates.

Noise of z times the clipping norm is added to the sum of the updates in each of T rounds. If one client's updates are
replaced by zeros, all rounds together are one Gaussian mechanism with noise of z / sqrt(T) (Dong, Roth and Su 2022,
Gaussian differential privacy, corollary 3.3), whose loss is known exactly (Balle and Wang 2018, theorem 8). Drawing
clients does not reduce the loss here: Flower draws a fixed number of them, and the drawn clients are not secret.
"""

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr

SWAMPING_RATIO = 20.0
"""Ratio of noise norm to clipping norm above which `noise_warning` warns: a rough choice, not a measured one."""


def gaussian_delta(epsilon: float, std: float) -> float:
    """Returns the delta of a Gaussian mechanism of sensitivity 1 at an epsilon."""
    # In logarithms, because exp(epsilon) overflows where the second normal tail underflows.
    return float(
        math.exp(log_ndtr(0.5 / std - epsilon * std)) - math.exp(epsilon + log_ndtr(-0.5 / std - epsilon * std))
    )


def epsilon_after(num_rounds: int, *, noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of `num_rounds` rounds together; infinite without noise, 0 before the first round."""
    if not num_rounds:
        return 0.0
    if not noise_multiplier:
        return math.inf
    std = noise_multiplier / math.sqrt(num_rounds)
    if gaussian_delta(0.0, std) <= delta:
        return 0.0
    most = 1.0
    while gaussian_delta(most, std) > delta:
        most *= 2
    return float(brentq(lambda epsilon: gaussian_delta(epsilon, std) - delta, 0.0, most, xtol=1e-9))


def noise_multiplier(epsilon: float, *, delta: float, num_rounds: int) -> float:
    """Returns the least noise with which all rounds together lose no more than epsilon."""
    least, most = 1.0, 1.0
    while gaussian_delta(epsilon, most) > delta:
        most *= 2
    while gaussian_delta(epsilon, least) <= delta:
        least /= 2
    return float(brentq(lambda std: gaussian_delta(epsilon, std) - delta, least, most)) * math.sqrt(num_rounds)


def noise_ratio(noise_multiplier: float, *, num_weights: int, num_clients: int) -> float:
    """Returns the norm of a round's noise over the largest norm that the mean of the clipped updates can have."""
    return noise_multiplier * math.sqrt(num_weights) / num_clients


def noise_warning(ratio: float, *, num_weights: int, num_clients: int) -> str:
    """Returns a warning if the noise swamps the updates, else ""."""
    if ratio <= SWAMPING_RATIO:
        return ""
    return (
        f"privacy.epsilon: the noise of a round is {ratio:.0f} times as long as the longest mean update, over "
        f"{num_weights:,} weights of {num_clients} clients; expect a worse model than without training. Train fewer "
        f"weights (lora.r), draw more clients (clients_per_round), take fewer rounds, or allow a larger epsilon"
    )
