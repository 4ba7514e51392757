"""Spikes of loss and gradient norm: their updates are left out, and after several of them the run goes back.

`Spikes` is an update between the finite check and clipping. What it judges by is robust: the median of the last
accepted updates and their median absolute deviation, on finite values only (those that are not belong to the finite
check).

Going back (Chowdhery et al. 2022, PaLM, section 5.1: restart from a checkpoint of before the spike, and skip the
batches that made it) takes weights and optimizer from a checkpoint; the loop does that. Steps are never counted twice:
update n always learns from batch n, and a run ends after as many batches as without. The batches between the checkpoint
and the present leave no trace; `spikes.jsonl` has their numbers. Everything here is in the checkpoint, and a run goes
back to checkpoints of fixed steps only, so that a run that is killed and started again does the same.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ConfigError
from modelwright.optim.update import Context
from modelwright.train.monitors.anomalies import MAD_TO_SIGMA

MAX_KEPT = 1000
NUM_GOOD = 2
"""Checkpoints that the run may go back to: the newer one may lie too close to the first spike."""


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """When an update is a spike, and what happens after several.

    num_sigmas: robust standard deviations above the median of the last `window` accepted updates, 0 judges nothing;
    loss_rise and norm_rise: a spike is also above the median by this share of it, the loss or the gradient norm.
    Nothing is judged before a third of the window is there; max_in_a_row: so many spikes in a row are a new level, and
    the next passes.

    rollback_after: spikes among the last `rollback_window` updates after which the run goes back, 0 never; to the
    newest checkpoint (of a multiple of `checkpoint_every_steps`) without spikes in the window before it and at least
    `margin` updates before the first of these; max_rollbacks: of the whole run. Then the learning rate is `lower_rate`
    times the scheduled one for `lower_steps` updates.
    """

    num_sigmas: float = 0.0
    window: int = 100
    loss_rise: float = 0.1
    norm_rise: float = 1.0
    max_in_a_row: int = 5
    rollback_after: int = 0
    rollback_window: int = 50
    margin: int = 10
    max_rollbacks: int = 3
    lower_rate: float = 1.0
    lower_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("num_sigmas", "loss_rise", "norm_rise", "rollback_after", "margin", "lower_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 switches it off")
        for name, least in (("window", 6), ("max_in_a_row", 1), ("rollback_window", 1), ("max_rollbacks", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, got {getattr(self, name)}")
        if not 0.0 < self.lower_rate <= 1.0:
            raise ConfigError(f"lower_rate: must be above 0 and at most 1, got {self.lower_rate}; 1 leaves the rate")
        if self.rollback_after and not self.num_sigmas:
            raise ConfigError("rollback_after: counts spikes, and num_sigmas is 0; 6 is usual")
        if self.rollback_after > min(self.max_in_a_row, self.rollback_window):
            raise ConfigError(
                f"rollback_after: {self.rollback_after} spikes never come together: max_in_a_row "
                f"({self.max_in_a_row}) and rollback_window ({self.rollback_window}) must be at least as many"
            )


class Spikes:
    """Leaves spikes out and says when to go back.

    `agree`: the maximum of a float over all ranks; path: each spike and each way back is a line there, on the first
    rank. A line: kind (`spike`, `rollback`), step (updates done then), batches (first and last that were left out, from
    0), loss and norm of a spike.
    """

    def __init__(self, config: SpikeConfig, agree: Callable[[float], float], path: Path, *, is_first: bool) -> None:
        self.config = config
        self.agree = agree
        self.path = path
        self.is_first = is_first
        self.events: list[dict[str, Any]] = []
        self.num_rollbacks = 0
        self._accepted: list[tuple[int, float, float]] = []
        self._recent: list[int] = []
        self._in_a_row = 0
        self._good: list[int] = []
        self._slow_until = 0

    def apply(self, context: Context) -> None:
        context.rate_multiplier *= self.config.lower_rate if context.step < self._slow_until else 1.0
        if context.skip or not self.config.num_sigmas:
            return
        spike = self._is_spike(context)
        self._recent = [step for step in self._recent if step > context.step - self.config.rollback_window]
        if self.agree(float(spike and self._in_a_row < self.config.max_in_a_row)) > 0:
            self._in_a_row += 1
            self._recent = [*self._recent, context.step]
            context.skip = True
            context.scalars["spike"] = 1.0
            values = {"loss": _plain(context.loss), "norm": _plain(context.grad_norm)}
            self._record(kind="spike", step=context.step + 1, batches=[context.step, context.step], **values)
            return
        if spike:  # a new level
            self._accepted, self._recent = [], []
        self._in_a_row = 0
        accepted = (context.step, context.loss, context.grad_norm)
        self._accepted = [*self._accepted, accepted][-self.config.window :]

    @property
    def wanted_steps(self) -> Sequence[int]:
        """Checkpoints that must not be removed."""
        return list(self._good)

    def saved(self, step: int) -> None:
        """A checkpoint is being written, after `step` updates."""
        calm = all(spike < step - self.config.rollback_window for spike in self._recent)
        if self.config.rollback_after and calm and step not in self._good:
            self._good = [*self._good, step][-NUM_GOOD:]

    def step_to_go_back_to(self) -> int:
        """0 while there is no reason to, or no way."""
        allowed = self.config.rollback_after > 0 and self.num_rollbacks < self.config.max_rollbacks
        if not allowed or len(self._recent) < self.config.rollback_after:
            return 0
        return max((step for step in self._good if step <= self._recent[0] - self.config.margin), default=0)

    def went_back(self, step: int, to: int) -> None:
        """After `step` updates, weights and optimizer are those of `to` again."""
        self.num_rollbacks += 1
        self._accepted = [entry for entry in self._accepted if entry[0] < to]
        self._good = [good for good in self._good if good <= to]
        self._recent, self._in_a_row = [], 0
        self._slow_until = step + self.config.lower_steps
        self._record(kind="rollback", step=step, batches=[to, step - 1])

    def forget(self, step: int) -> None:
        """The checkpoint of this step cannot be read."""
        self._good = [good for good in self._good if good != step]

    def state_dict(self) -> dict[str, Any]:
        return {
            "events": list(self.events),
            "num_rollbacks": self.num_rollbacks,
            "accepted": [list(entry) for entry in self._accepted],
            "recent": list(self._recent),
            "in_a_row": self._in_a_row,
            "good": list(self._good),
            "slow_until": self._slow_until,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state and write the list as it was at that checkpoint."""
        self.events, self.num_rollbacks = list(state["events"]), int(state["num_rollbacks"])
        self._accepted = [(int(step), float(loss), float(norm)) for step, loss, norm in state["accepted"]]
        self._recent, self._in_a_row = list(state["recent"]), int(state["in_a_row"])
        self._good, self._slow_until = list(state["good"]), int(state["slow_until"])
        if self.events or self.path.exists():
            self._write()

    def _is_spike(self, context: Context) -> bool:
        if len(self._accepted) < self.config.window / 3:
            return False
        _, losses, norms = zip(*self._accepted, strict=True)
        return context.loss > self._limit(losses, self.config.loss_rise) or context.grad_norm > self._limit(
            norms, self.config.norm_rise
        )

    def _limit(self, values: Sequence[float], rise: float) -> float:
        middle = statistics.median(values)
        spread = MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)
        return middle + max(self.config.num_sigmas * spread, rise * abs(middle))

    def _record(self, **event: Any) -> None:
        if len(self.events) < MAX_KEPT:
            self.events.append(event)
            self._write()

    def _write(self) -> None:
        if self.is_first:
            write_atomic(self.path, "".join(json.dumps(event) + "\n" for event in self.events))


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
