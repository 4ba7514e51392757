"""Gradient clipping by the global norm, to a fixed limit or to one that follows recent norms."""

from dataclasses import dataclass, field
from typing import Any

from modelwright.train.optim.clip import AdaptiveClipConfig, scale_to_norm
from modelwright.train.runtime import Runtime
from modelwright.train.technique import Technique, Update


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
