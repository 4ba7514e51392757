"""From the rewards of completions to what PPO learns from: normalization, clipping, penalties, and the weight of the KL
penalty.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from modelwright.objectives.rollouts import Rollout

MAX_ERROR = 0.2
"""Largest relative error of the KL that the controller reacts to (Ziegler et al. 2019, section 2.2)."""


@dataclass(kw_only=True)
class KlController:
    """The weight of the KL penalty: fixed, or led by a proportional controller to where the KL of a completion is
    `target` (Ziegler et al. 2019, section 2.2, and the adaptive controller of lm-human-preferences).

    coefficient: the weight now; target: in nats, 0 to keep the weight; horizon: completions over which it adapts.
    """

    coefficient: float
    target: float
    horizon: int

    def update(self, kl: float, num_completions: int) -> None:
        """Adapt the weight to the mean KL of these many completions."""
        if self.target:
            error = min(MAX_ERROR, max(-MAX_ERROR, kl / self.target - 1))
            self.coefficient *= 1 + error * num_completions / self.horizon


@dataclass(kw_only=True)
class RunningMoments:
    """Mean and variance of all scores so far, added up in batches (Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences from the mean."""

    def add(self, scores: Tensor) -> None:
        """Add scores [N]."""
        if not len(scores):
            return
        mean = float(scores.double().mean())
        total, difference = self.count + len(scores), mean - self.mean
        self.squares += float((scores.double() - mean).square().sum())
        self.squares += difference**2 * self.count * len(scores) / total
        self.mean += difference * len(scores) / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation (divisor n - 1); 1 while there are fewer than two different scores."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 and self.squares else 1.0


def completion_scores(
    rollout: Rollout, moments: RunningMoments | None, *, clip: float, missing_eos_penalty: float
) -> Tensor:
    """The score of each completion [C] float64: its reward, minus a penalty if it does not end by itself, normalized by
    the moments of all scores so far (without them it is not), and clipped to +- `clip` (0 for no limit).
    """
    scores_C = rollout.rewards_C - missing_eos_penalty * (~rollout.stopped_C).double()
    if moments is not None:
        moments.add(scores_C)
        scores_C = (scores_C - moments.mean) / moments.std
    return scores_C.clamp(-clip, clip) if clip else scores_C
