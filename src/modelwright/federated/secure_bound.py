"""What clients that keep the rules add to a secure sum: their noise, and the largest norm that their sum can have.

The server sees the sum alone, so that its norm is all by which it can notice a client that does not keep them.
"""

import math
from collections.abc import Sequence

import numpy as np

from modelwright.core.errors import ModelwrightError
from modelwright.federated.config import FederatedConfig

HONEST_REFUSED = 1e-9
"""Probability, at most, with which a round of honest clients is refused for the length of its noise."""
FP32_SLACK = 1e-6
"""Relative: an update that was scaled down in FP32 may exceed `clip_norm` by 2^-23."""


def client_noise_std(config: FederatedConfig) -> float:
    """Standard deviation of the noise of one client, such that `threshold` of them make enough for the sum."""
    privacy = config.privacy
    return privacy.noise_multiplier * privacy.clip_norm / math.sqrt(config.secure_sum.threshold)


def largest_norm(config: FederatedConfig, *, num_clients: int, size: int, weight: float) -> float:
    """The norm that the sum of so many honest updates, of `size` numbers each, does not exceed.

    weight: the sum of their weights. With noise every update counts as 1, and honest clients exceed it with the
    probability `HONEST_REFUSED`: the norm of s + g, for Gaussian g of standard deviation d, has a mean of at most
    sqrt(|s|^2 + d^2 size), and exceeds its mean by t with a probability of at most exp(-t^2 / 2 d^2) (Boucheron, Lugosi
    and Massart 2013, Concentration Inequalities, theorem 5.6).
    """
    clip_norm, has_noise = config.privacy.clip_norm, config.privacy.noise_multiplier > 0
    step = 2.0 ** -(config.secure_sum.fraction_bits + 1)  # each number, and the weight, is rounded by so much at most
    rounding = num_clients * step * (math.sqrt(size) + clip_norm)
    updates = (1 + FP32_SLACK) * clip_norm * (num_clients if has_noise else weight) + rounding
    std = client_noise_std(config) * math.sqrt(num_clients)
    return math.hypot(updates, std * math.sqrt(size)) + std * math.sqrt(2 * math.log(1 / HONEST_REFUSED))


def check_sum(change: np.ndarray, config: FederatedConfig, *, clients: Sequence[str], weight: float) -> None:
    """Raise `ModelwrightError` for a sum of updates [N, float64] that these clients cannot have made by the rules.
    weight: the sum of their weights.
    """
    if not weight > 0:
        raise ModelwrightError("federated: the updates of the secure sum count for nothing")
    norm = float(np.linalg.norm(change))
    most = largest_norm(config, num_clients=len(clients), size=len(change), weight=weight)
    if norm > most:
        raise ModelwrightError(
            f"federated: the secure sum of {', '.join(clients)} has a norm of {norm:.3g}, above the {most:.3g} that "
            f"updates within privacy.clip_norm ({config.privacy.clip_norm:g}) and their noise can make; at least one "
            "of these clients does not clip, and rounds without it will pass"
        )
