"""Skips steps whose loss or gradients are not finite, and steps without any label."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from modelwright.core.config import ModelwrightError
from modelwright.train.technique import EMPTY_BATCH, NOT_FINITE, Runtime, Technique, Update


@dataclass(eq=False)
class FiniteCheck:
    """Measures the gradient norm and skips the step if it or the loss is not finite. Both are the same on all ranks, so
    that all of them skip; the next step's vote reveals a rank that did not.

    norm: the norm of the whole model's gradients, the same on all ranks.
    max_skipped: number of skipped steps in a row at which a `ModelwrightError` ends the run, because nothing is learned
    anymore.
    """

    norm: Callable[[list[Tensor]], Tensor | float]
    max_skipped: int
    num_skipped: int = 0
    num_in_a_row: int = 0

    def on_gradients(self, update: Update) -> None:
        # A norm is not finite if any element is not, so one number checks all gradients.
        update.read(self.norm(update.tensors))
        skip = not (math.isfinite(update.grad_norm) and math.isfinite(update.loss))
        self.num_skipped += skip
        self.num_in_a_row = self.num_in_a_row + 1 if skip else 0
        if skip:
            update.skip(NOT_FINITE)
        if self.num_in_a_row >= self.max_skipped:
            raise ModelwrightError(
                f"step {update.step + 1}: loss or gradients were not finite for {self.num_in_a_row} steps in a row; "
                "lower the learning rate or max_grad_norm, and run again"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_skipped, self.num_in_a_row = state["num_skipped"], state["num_in_a_row"]


def finite_check(max_skipped_steps: int, run: Runtime, *, measures: bool = True) -> Technique:
    """measures: false to take 1 for the norm."""
    check = FiniteCheck(
        lambda gradients: run.strategy.grad_norm(gradients) if measures else 1.0, max_skipped=max_skipped_steps
    )
    return Technique(
        name="finite_check",
        on_gradients=check.on_gradients,
        state=check,
        summary=lambda: {"num_skipped": check.num_skipped},
        needs=frozenset(),
    )


def skip_empty_batches(run: Runtime) -> Technique:
    """Leaves weights and moments unchanged in a step without any label. Acts after the loss scale, because this is not
    an overflow, and before techniques that keep a history of losses and norms.
    """

    def on_gradients(update: Update) -> None:
        if update.is_empty:
            update.skip(EMPTY_BATCH)
            update.metrics["empty"] = 1.0

    return Technique(name="skip_empty_batches", on_gradients=on_gradients, needs=frozenset())
