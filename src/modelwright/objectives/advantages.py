"""Policy gradients: advantages of completions and tokens, and terms of the losses of single tokens: clipped surrogate,
KL estimators, clipped value loss. Log-probabilities are in nats.

Legend: P prompts, G completions of each, C completions, T places (see `experience.py`).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Baseline = Literal["group_mean", "leave_one_out"]
RewardScale = Literal["group", "batch", "none"]

STD_EPS = 1e-4
"""Offset of standard deviations of rewards, as in TRL."""
WHITEN_EPS = 1e-8
"""Offset of variances in whitening, as in TRL and lm-human-preferences."""


def group_advantages(rewards_PG: Tensor, *, baseline: Baseline, scale: RewardScale) -> Tensor:
    """Advantages [P, G] float64 of the completions of each prompt. Completions without a reward, NaN in `rewards_PG`,
    are ignored and stay NaN, and a single completion with a reward in its group becomes NaN.

    baseline: `group_mean` is the mean of the group (GRPO, Shao et al. 2024, section 4.1.2), `leave_one_out` that of the
    others (RLOO, Kool et al. 2019; Ahmadian et al. 2024), which gives G / (G - 1) times as much. scale: divisor of the
    difference: the standard deviation of the group, as in GRPO, that of the whole rollout, or none, as in Dr. GRPO (Liu
    et al. 2025, section 3.1), because the division weights questions by their difficulty.
    """
    scored_PG = rewards_PG.isfinite()
    counts_P1 = scored_PG.sum(dim=1, keepdim=True)
    rewards_PG = rewards_PG.double().where(scored_PG, 0.0)
    above_PG = rewards_PG - rewards_PG.sum(dim=1, keepdim=True) / counts_P1.clamp(min=1)
    if baseline == "leave_one_out":
        # r - mean of the others = (r - mean of all) * n / (n - 1)
        above_PG = above_PG * counts_P1 / (counts_P1 - 1).clamp(min=1)
    counted_PG = scored_PG & (counts_P1 > 1)
    if scale == "group":
        above_PG = above_PG / (group_stds(rewards_PG.where(scored_PG, torch.nan))[:, None].nan_to_num(0.0) + STD_EPS)
    elif scale == "batch":
        kept = rewards_PG[scored_PG]
        above_PG = above_PG / ((kept.std() if len(kept) > 1 else torch.zeros(())) + STD_EPS)
    return above_PG.where(counted_PG, torch.nan)


def group_stds(rewards_PG: Tensor) -> Tensor:
    """Standard deviation (divisor n - 1) of each prompt's rewards [P] float64; NaN with fewer than two."""
    scored_PG = rewards_PG.isfinite()
    counts_P = scored_PG.sum(dim=1)
    values_PG = rewards_PG.double().where(scored_PG, 0.0)
    means_P1 = values_PG.sum(dim=1, keepdim=True) / counts_P.clamp(min=1)[:, None]
    squares_P = ((values_PG - means_P1).square() * scored_PG).sum(dim=1)
    return (squares_P / (counts_P - 1).clamp(min=1)).sqrt().where(counts_P > 1, torch.nan)


def differs(rewards_PG: Tensor) -> Tensor:
    """Returns whether each prompt has two different rewards [P] bool."""
    # Not by the standard deviation, which rounding may leave above zero for equal rewards
    scored_PG = rewards_PG.isfinite()
    return rewards_PG.where(scored_PG, -torch.inf).amax(dim=1) > rewards_PG.where(scored_PG, torch.inf).amin(dim=1)


def generalized_advantages(
    rewards_CT: Tensor, values_CT: Tensor, mask_CT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [C, T], 0 outside of `mask_CT` (Schulman et al. 2016, equation 16)."""
    # The places of a row are contiguous, and the mask resets both to 0 past the last one: a completion is an episode
    advantages_CT = torch.zeros_like(values_CT)
    following_C = torch.zeros_like(values_CT[:, 0])
    next_values_C = torch.zeros_like(following_C)
    for place in reversed(range(values_CT.shape[1])):
        mask_C = mask_CT[:, place]
        deltas_C = rewards_CT[:, place] + gamma * next_values_C - values_CT[:, place]
        following_C = (deltas_C + gamma * lam * following_C) * mask_C
        next_values_C = values_CT[:, place] * mask_C
        advantages_CT[:, place] = following_C
    return advantages_CT, (advantages_CT + values_CT) * mask_CT


def whitened(values_CT: Tensor, mask_CT: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Normalizes to mean 0, or the original one without `shift_mean`, and variance 1 over `mask_CT`; 0 elsewhere."""
    kept = values_CT[mask_CT]
    if len(kept) < 2:
        return values_CT * mask_CT
    mean, variance = kept.mean(), kept.var()
    whitened_CT = (values_CT - mean) * (variance + WHITEN_EPS).rsqrt()
    return (whitened_CT if shift_mean else whitened_CT + mean) * mask_CT


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
