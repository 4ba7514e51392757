"""Sensitivity of the loss to one part of the model computing in a narrower format, measured by trial forward passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelwright.ops.lowp_linear import Format
from modelwright.precision.apply import ModelPrecision
from modelwright.precision.indicators import relative_rise

TRIALS = 2
"""Pairs that are tried again at each decision; a pair that was never tried is tried before a part changes to it."""
Pair = tuple[str, Format]


@dataclass(kw_only=True)
class SensitivityTrials:
    """Tries parts in formats and records the relative rise of the loss for each pair. Every rank makes the same trials,
    including parts that it does not hold.
    """

    formats: ModelPrecision
    loss: Callable[[], float]
    """The loss over all ranks of some rows of the present batch, with the formats in force."""
    sensitivity: dict[Pair, float] = field(default_factory=dict)
    """Relative rise of the loss with the part in the format instead of FP32, when last tried."""
    next_trial: int = 0
    """Counts through the pairs."""
    losses: dict[Pair, float] = field(default_factory=dict)
    """With one part in a format and the others as they are, at the present decision."""

    def begin(self, present: Sequence[Pair], pairs: Sequence[Pair]) -> None:
        """Forget the losses of earlier weights, and try the next few `pairs`. present: the format of each part. pairs:
        all candidates, the formats of one part in a row, because the model changes between two rounds of trials.
        """
        self.losses = dict.fromkeys(present, self.loss())
        for _ in range(min(TRIALS, len(pairs))):
            self.rise(*pairs[self.next_trial % len(pairs)])
            self.next_trial += 1

    def rise(self, part: str, chosen: Format) -> float | None:
        """Relative rise of the loss with the part in this format instead of FP32, while the others stay as they are.
        None if no row has a label.
        """
        exact, narrow = (self._loss_with(part, name) for name in ("fp32", chosen))
        if exact == 0.0:
            return None
        self.sensitivity[part, chosen] = relative_rise(exact, narrow)
        return self.sensitivity[part, chosen]

    def of_part(self, part: str) -> dict[Format, float]:
        """The measured rises by format."""
        return {chosen: rise for (name, chosen), rise in self.sensitivity.items() if name == part}

    def _loss_with(self, part: str, chosen: Format) -> float:
        if (part, chosen) not in self.losses:
            is_here, present = part in self.formats.formats, dict(self.formats.formats)
            if is_here:
                self.formats.change({part: chosen})
            self.losses[part, chosen] = self.loss()
            if is_here:
                self.formats.change(present)
        return self.losses[part, chosen]

    def state_dict(self) -> dict[str, Any]:
        return {
            "sensitivity": [[*pair, rise] for pair, rise in self.sensitivity.items()],
            "next_trial": self.next_trial,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sensitivity = {(part, chosen): float(rise) for part, chosen, rise in state["sensitivity"]}
        self.next_trial = int(state["next_trial"])
