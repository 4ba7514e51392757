"""Gradient clipping by the global norm, to a fixed limit or to one that follows recent norms."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from modelwright.core.compatibility import WHOLE_GRADIENTS, Feature, feature
from modelwright.core.config import ConfigError, constant
from modelwright.train.technique import Runtime, Technique, Update


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipConfig:
    """A clipping limit that follows the gradient norms of recent updates, measured before clipping.

    The limit never falls below `max_grad_norm`, and equals it until a third of the window has been seen.
    """

    kind: Literal["none", "percentile", "zscore"] = "none"
    """`percentile`: that percentile of recent norms (AutoClip, Seetharaman et al. 2020); `zscore`: their mean plus
    some standard deviations; `none`: always `max_grad_norm`."""
    window_steps: int = constant(100)
    """Number of updates whose norms are remembered."""
    percentile: float = constant(90.0)
    """Percentile that `percentile` clips at."""
    num_stddev: float = constant(2.0)
    """Standard deviations above the mean that `zscore` clips at."""

    def __post_init__(self) -> None:
        if self.window_steps < 6:
            raise ConfigError(f"window_steps: must be at least 6 updates, got {self.window_steps}; 100 is usual")
        if not 0.0 < self.percentile <= 100.0:
            raise ConfigError(f"percentile: must be above 0 and at most 100, got {self.percentile}; 90 is usual")
        if self.num_stddev <= 0:
            raise ConfigError(f"num_stddev: must be above 0, got {self.num_stddev}; 2 is usual")

    def features(self) -> list[Feature]:
        """Requirements of adaptive clipping on a run."""
        return [feature("kind", self.kind, needs=[WHOLE_GRADIENTS])] if self.kind != "none" else []

    def limit(self, norms: Sequence[float], floor: float) -> float:
        """The largest norm that passes unclipped, after these norms (oldest first)."""
        # A percentile or a deviation of a few norms is mostly noise.
        if self.kind == "none" or len(norms) < self.window_steps / 3:
            return floor
        recent = norms[-self.window_steps :]
        if self.kind == "percentile":
            # The smallest norm that this percentage of the norms do not exceed (nearest rank).
            return max(floor, sorted(recent)[max(0, math.ceil(self.percentile / 100.0 * len(recent)) - 1)])
        return max(floor, statistics.fmean(recent) + self.num_stddev * statistics.pstdev(recent))


def scale_to_norm(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """Scales in place so that the global norm `norm` becomes at most `max_norm` (Pascanu et al. 2013)."""
    # 1e-6 as in `torch.nn.utils.clip_grad_norm_`.
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))  # pyright: ignore


def clip_naive(gradients: list[Tensor], max_norm: float) -> float:
    """Clips by the definition, as reference for `ops.total_norm` and `scale_to_norm`; returns the norm before."""
    norm = sum(float((gradient.double() ** 2).sum()) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


@dataclass(eq=False)
class GradientClipping:
    """Scales the gradients so that their global norm is at most `max_norm`, or the limit that recent norms give."""

    max_norm: float
    adaptive: AdaptiveClipConfig
    norms: list[float] = field(default_factory=list[float])

    def on_gradients(self, update: Update) -> None:
        if update.skipped:
            return
        # By the norms before this one: an outlier must not raise its own limit.
        limit = self.adaptive.limit(self.norms, self.max_norm)
        scale_to_norm(update.tensors, update.grad_norm, limit)
        if self.adaptive.kind != "none":
            update.metrics["clip_norm"] = limit
            # Norms before clipping; a history of clipped ones could only fall.
            self.norms = [*self.norms, update.grad_norm][-self.adaptive.window_steps :]

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = list(state["norms"])


def gradient_clipping(max_norm: float, adaptive: AdaptiveClipConfig, run: Runtime) -> Technique | None:
    """max_norm: 0 disables clipping."""
    if max_norm <= 0:
        return None
    clip = GradientClipping(max_norm, adaptive)
    return Technique(
        name="gradient_clipping", on_gradients=clip.on_gradients, state=clip, belongs_to_weights=True, needs=frozenset()
    )
