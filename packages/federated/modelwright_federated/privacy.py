"""The privacy loss of rounds with Gaussian noise, and how the noise compares with what it hides.

Noise of z times the clipping norm is added to the sum of the updates in each of T rounds. For one client's updates
replaced by zeros, all rounds together are one Gaussian mechanism with noise of z / sqrt(T) (Dong, Roth and Su 2022,
Gaussian differential privacy, corollary 3.3), whose loss is known exactly (Balle and Wang 2018, theorem 8). Nothing is
subtracted for the drawing of clients: Flower draws a fixed number of them, and who was drawn is no secret.
"""

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr

SWAMPING_RATIO = 20.0
"""Noise norm over clipping norm from which on `noise_warning` speaks: a rough choice, not a measured one."""


def gaussian_delta(epsilon: float, std: float) -> float:
    """The delta of a Gaussian mechanism of sensitivity 1 at an epsilon."""
    return float(
        math.exp(log_ndtr(0.5 / std - epsilon * std)) - math.exp(epsilon + log_ndtr(-0.5 / std - epsilon * std))
    )


def epsilon_after(num_rounds: int, *, noise_multiplier: float, delta: float) -> float:
    """The epsilon of so many rounds together; infinite without noise, 0 before the first round."""
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
    """The least noise with which so many rounds together lose no more than epsilon."""
    least, most = 1.0, 1.0
    while gaussian_delta(epsilon, most) > delta:
        most *= 2
    while gaussian_delta(epsilon, least) <= delta:
        least /= 2
    return float(brentq(lambda std: gaussian_delta(epsilon, std) - delta, least, most)) * math.sqrt(num_rounds)


def noise_ratio(noise_multiplier: float, *, num_weights: int, num_clients: int) -> float:
    """The norm of a round's noise over the largest norm that the mean of the clipped updates can have."""
    return noise_multiplier * math.sqrt(num_weights) / num_clients


def noise_warning(ratio: float, *, num_weights: int, num_clients: int) -> str:
    """A remark if the noise swamps the updates, "" if not."""
    if ratio <= SWAMPING_RATIO:
        return ""
    return (
        f"privacy.epsilon: the noise of a round is {ratio:.0f} times as long as the longest mean update, over "
        f"{num_weights:,} weights of {num_clients} clients; expect a worse model than without training. Train fewer "
        f"weights (lora.r), draw more clients (clients_per_round), take fewer rounds, or allow a larger epsilon"
    )
