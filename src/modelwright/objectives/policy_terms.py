"""Terms of policy-gradient losses for single tokens: clipped surrogate, KL estimators, clipped value loss.

Arguments are tensors of one shape, usually [B, T]; log-probabilities are in nats.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    losses: Tensor
    """Terms that training minimizes."""
    clipped_low: Tensor
    """bool, true where the lower bound of the ratio removes the gradient."""
    clipped_high: Tensor
    """bool, true where the upper bound removes the gradient."""


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, low: float, high: float
) -> PolicyLoss:
    """Clipped surrogate objective (PPO, Schulman et al. 2017, equation 7), negated: the larger of two losses, which is
    the smaller of two objectives.

    old_log_probs: log-probabilities of the same tokens under the policy that generated them. low, high: the ratio of
    probabilities is clipped to [1 - low, 1 + high]; a larger `high` is the "clip higher" of DAPO (Yu et al. 2025,
    section 3.1).
    """
    ratio = (log_probs - old_log_probs).exp()
    # A bound acts on one sign of the advantage only: the other sign moves the ratio back into its range
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return PolicyLoss(losses, (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0))


def kl_k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy || reference) at a token of the policy (k1 of Schulman 2020)."""
    return log_probs - reference_log_probs


def kl_k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Biased estimate of low variance: half the squared difference (k2 of Schulman 2020)."""
    return (log_probs - reference_log_probs).square() / 2


def kl_k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Unbiased estimate that is never negative (k3 of Schulman 2020; GRPO, Shao et al. 2024, equation 4)."""
    difference = reference_log_probs - log_probs
    return difference.exp() - difference - 1


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Half the squared errors of values clipped to +- `cliprange` around the old ones, and where clipping decides."""
    # The value clipping of OpenAI's baselines: the larger of two losses, as for the policy
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    plain_losses, clipped_losses = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(plain_losses, clipped_losses) / 2, clipped_losses > plain_losses
