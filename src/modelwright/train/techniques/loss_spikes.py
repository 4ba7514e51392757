"""Spikes of loss and gradient norm: their updates are skipped, and after several of them the run rolls back.

`LossSpikes` acts between the finite check and clipping. It judges by robust statistics: the median of the last accepted
updates and their median absolute deviation (MAD), of finite values only (non-finite ones are the finite check's). Both
barely move when a few values are far off (Hampel 1974; Leys et al. 2013 recommend the MAD over the standard deviation
for outliers).

Rolling back (Chowdhery et al. 2022, PaLM, section 5.1: restart from a checkpoint before the spike, and skip the batches
that caused it) restores weights and optimizer from a checkpoint; the trainer does that on request. Steps are never
counted twice: update n always learns from batch n, and a run ends after as many batches as without. The batches between
the checkpoint and the present leave no trace; `loss_spikes.jsonl` lists their numbers. Everything here is in the
checkpoint, and a run rolls back to checkpoints of fixed steps only, so that a run that is killed and restarted does the
same.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from modelwright.core import compatibility as traits
from modelwright.core.config import ConfigError, constant
from modelwright.core.records import EventLog
from modelwright.train.objective import Batch
from modelwright.train.technique import LOSS_SPIKE, Rollback, Runtime, StepInfo, Technique, Update

NUM_GOOD = 2
"""Checkpoints that a rollback may use: the newer one may be too close to the first spike."""


@dataclass(frozen=True, kw_only=True)
class LossSpikeConfig:
    """Skip updates at jumps of loss or gradient norm, and roll back after several (PaLM, Chowdhery et al. 2022)."""

    num_sigmas: float = 0.0
    """Robust standard deviations above the median of recent accepted updates at which an update is skipped; 0 skips
    none; 6 is usual."""
    rollback_after: int = 0
    """Number of spikes among recent updates at which the run rolls back to a checkpoint from before the first of them
    and continues with the next batches; 0 never. Needs `checkpoint_every_steps`."""
    max_rollbacks: int = constant(3)
    """Most rollbacks of a run."""
    lr_factor: float = constant(1.0)
    """Factor on the learning rate for a while after a rollback."""
    window_steps: int = constant(100)
    """Accepted updates that the next is compared with; nothing is judged before a third of them."""
    min_loss_rise: float = constant(0.1)
    """Least relative rise of the loss over the median in a spike."""
    min_norm_rise: float = constant(1.0)
    """Least relative rise of the gradient norm over the median in a spike."""
    max_consecutive: int = constant(5)
    """Number of spikes in a row after which the next update is accepted, as a new level."""
    rollback_window_steps: int = constant(50)
    """Updates among which `rollback_after` counts spikes."""
    rollback_margin_steps: int = constant(10)
    """Least updates between the checkpoint and the first spike."""
    lr_factor_steps: int = constant(100)
    """Updates for which `lr_factor` holds."""

    def __post_init__(self) -> None:
        rises, rollbacks = ("min_loss_rise", "min_norm_rise"), ("rollback_after", "rollback_margin_steps")
        for name in ("num_sigmas", *rises, *rollbacks, "lr_factor_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}; 0 disables it")
        leasts = {"window_steps": 6, "max_consecutive": 1, "rollback_window_steps": 1, "max_rollbacks": 1}
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, got {getattr(self, name)}")
        if not 0.0 < self.lr_factor <= 1.0:
            raise ConfigError(f"lr_factor: must be above 0 and at most 1, got {self.lr_factor}; 1 keeps the rate")
        if self.rollback_after and not self.num_sigmas:
            raise ConfigError("rollback_after: counts spikes, and num_sigmas is 0; 6 is usual")
        if self.rollback_after > min(self.max_consecutive, self.rollback_window_steps):
            raise ConfigError(
                f"rollback_after: {self.rollback_after} spikes cannot be reached: max_consecutive "
                f"({self.max_consecutive}) and rollback_window_steps ({self.rollback_window_steps}) must be as many"
            )

    def features(self) -> list[traits.Feature]:
        """Returns the features that are enabled, with the properties of a run that they need."""
        needs = {traits.WHOLE_GRADIENTS, traits.SYNCHRONOUS_UPDATES}
        result = [traits.feature("num_sigmas", needs=needs)] if self.num_sigmas else []
        if self.rollback_after:
            needs |= {traits.EXACT_SUMS, traits.PROMPT_GRADIENTS, traits.EQUAL_REPLICAS, traits.REVERSIBLE_UPDATES}
            result.append(traits.feature("rollback_after", needs=needs))
        return result


MAD_TO_SIGMA = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""


@dataclass(frozen=True)
class RobustLevel:
    """Median and robust standard deviation of some values."""

    median: float
    sigma: float

    @staticmethod
    def of(values: Sequence[float]) -> "RobustLevel":
        """Measure at least one finite value."""
        median = statistics.median(values)
        return RobustLevel(median, MAD_TO_SIGMA * statistics.median(abs(value - median) for value in values))

    def upper_limit(self, num_sigmas: float, min_rise: float) -> float:
        """The largest value that is not an outlier. min_rise: least distance from the median, relative to it, so that
        small changes of a nearly constant series, whose deviation is close to 0, are not outliers.
        """
        return self.median + max(num_sigmas * self.sigma, min_rise * abs(self.median))


class RecentValues:
    """The last `size` accepted values of a series, each with its step, and their level. The caller decides which values
    to accept: outliers should be excluded, or the level follows them. Values must be finite.
    """

    def __init__(self, size: int) -> None:
        assert size >= 1
        self.size = size
        self._entries: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def values(self) -> list[float]:
        """Accepted values, oldest first."""
        return [value for _, value in self._entries]

    @property
    def level(self) -> RobustLevel | None:
        """Level of the values; None until a third of the window is filled: fewer say too little about the series."""
        return RobustLevel.of(self.values) if len(self._entries) >= self.size / 3 else None

    def add(self, step: int, value: float) -> None:
        assert math.isfinite(value)
        self._entries = [*self._entries, (step, value)][-self.size :]

    def drop_from(self, step: int) -> None:
        """Remove the values of this step and of later ones, after a rollback."""
        self._entries = [entry for entry in self._entries if entry[0] < step]

    def clear(self) -> None:
        """Start over, because the series has reached a new level."""
        self._entries = []

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [list(entry) for entry in self._entries]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._entries = [(int(step), float(value)) for step, value in state["entries"]]


class LossSpikes:
    """Skips updates at spikes and decides when to roll back.

    `agree`: the maximum of a float over all ranks; path: each spike and each rollback is a line there, on the first
    rank. A line: kind (`spike`, `rollback`), step (updates done then), batches (first and last that were skipped, from
    0), loss and norm of a spike.
    """

    def __init__(
        self,
        config: LossSpikeConfig,
        agree: Callable[[float], float],
        path: Path,
        *,
        is_first: bool,
        checkpoint_every: int = 0,
    ) -> None:
        self.config = config
        self.checkpoint_every = checkpoint_every
        self.agree = agree
        self._log = EventLog(path, is_first=is_first)
        self.num_rollbacks = 0
        # Of accepted updates only, so that spikes do not raise the level that they are compared with.
        self._losses, self._norms = RecentValues(config.window_steps), RecentValues(config.window_steps)
        self._recent: list[int] = []
        self._in_a_row = 0
        self.pinned_checkpoints: list[int] = []
        """Steps of the checkpoints that a rollback may use; they must not be removed."""
        self._slow_until = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._log.events

    def lower_rate(self, optimizer: Optimizer, step: int) -> None:
        """After a rollback the rate of update `step` is lower than the scheduled one, which has been set already."""
        if step < self._slow_until:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.config.lr_factor

    def on_gradients(self, update: Update) -> None:
        if update.skipped or not self.config.num_sigmas:
            return
        judged = (
            (update.loss, self._losses.level, self.config.min_loss_rise),
            (update.grad_norm, self._norms.level, self.config.min_norm_rise),
        )
        spike = any(
            level is not None and value > level.upper_limit(self.config.num_sigmas, rise)
            for value, level, rise in judged
        )
        self._recent = [step for step in self._recent if step > update.step - self.config.rollback_window_steps]
        # All ranks skip if any of them does: one that updated alone would have other weights.
        if self.agree(float(spike and self._in_a_row < self.config.max_consecutive)) > 0:
            self._in_a_row += 1
            self._recent = [*self._recent, update.step]
            update.skip(LOSS_SPIKE)
            update.metrics["spike"] = 1.0
            batches, loss, norm = [update.step, update.step], update.loss, update.grad_norm
            self._log.append(kind="spike", step=update.step + 1, batches=batches, loss=loss, norm=norm)
            return
        if spike:  # the agreed end of a series of spikes: from here on their level counts as normal
            self._losses.clear()
            self._norms.clear()
            self._recent = []
        self._in_a_row = 0
        self._losses.add(update.step, update.loss)
        self._norms.add(update.step, update.grad_norm)

    def on_step_end(self, step: int) -> Sequence[int]:
        """Called after `step` updates. Returns the checkpoints to roll back to, best first; empty for no rollback."""
        if targets := self.rollback_targets():
            return targets
        self._pin(step)
        return ()

    def rollback_targets(self) -> list[int]:
        allowed = self.config.rollback_after > 0 and self.num_rollbacks < self.config.max_rollbacks
        if not allowed or len(self._recent) < self.config.rollback_after:
            return []
        return sorted(
            (step for step in self.pinned_checkpoints if step <= self._recent[0] - self.config.rollback_margin_steps),
            reverse=True,
        )

    def rolled_back(self, step: int, to: int) -> None:
        """Called when, after `step` updates, weights and optimizer are those of `to` again."""
        self.num_rollbacks += 1
        self._losses.drop_from(to)
        self._norms.drop_from(to)
        self.pinned_checkpoints = [good for good in self.pinned_checkpoints if good <= to]
        self._recent, self._in_a_row = [], 0
        self._slow_until = step + self.config.lr_factor_steps
        self._log.append(kind="rollback", step=step, batches=[to, step - 1])
        self._pin(step)

    def _pin(self, step: int) -> None:
        """Remember a checkpoint for rollbacks, if one is written at this step and no spike is recent."""
        # Checkpoints by the clock do not count: a repeated run would have them at other steps, and roll back elsewhere.
        if not self.checkpoint_every or step % self.checkpoint_every:
            return
        calm = all(spike < step - self.config.rollback_window_steps for spike in self._recent)
        if self.config.rollback_after and calm and step not in self.pinned_checkpoints:
            self.pinned_checkpoints = [*self.pinned_checkpoints, step][-NUM_GOOD:]

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._log.state_dict(),
            "num_rollbacks": self.num_rollbacks,
            "losses": self._losses.state_dict(),
            "norms": self._norms.state_dict(),
            "recent": list(self._recent),
            "in_a_row": self._in_a_row,
            "good": list(self.pinned_checkpoints),
            "slow_until": self._slow_until,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._log.load_state_dict(state)
        self.num_rollbacks = int(state["num_rollbacks"])
        self._losses.load_state_dict(state["losses"])
        self._norms.load_state_dict(state["norms"])
        self._recent, self._in_a_row = list(state["recent"]), int(state["in_a_row"])
        self.pinned_checkpoints, self._slow_until = list(state["good"]), int(state["slow_until"])


def loss_spikes(config: LossSpikeConfig, run: Runtime, *, checkpoint_every: int) -> Technique | None:
    """Lowers the learning rate after a rollback, so it acts after the rate is set. checkpoint_every: steps between the
    checkpoints that a rollback may use.
    """
    if not config.num_sigmas:
        return None
    path = run.folder / "loss_spikes.jsonl"
    spikes = LossSpikes(config, run.max_over_ranks, path, is_first=run.is_first, checkpoint_every=checkpoint_every)

    def on_batch(step: int, batch: Batch) -> Batch:
        spikes.lower_rate(run.replica.optimizer, step)
        return batch

    def on_step_end(info: StepInfo) -> Rollback | None:
        def done(to: int) -> None:
            spikes.rolled_back(info.step, to)
            text = f"back to the weights of step {to}; batches {to} to {info.step - 1} have left no trace"
            run.report(info.step, "rollback", to, info.step, text)

        targets = spikes.on_step_end(info.step)
        return Rollback(steps=targets, done=done) if targets else None

    return Technique(
        name="loss_spikes",
        on_batch=on_batch,
        on_gradients=spikes.on_gradients,
        on_step_end=on_step_end,
        state=spikes,
        pinned_checkpoints=lambda: list(spikes.pinned_checkpoints),
        summary=lambda: {"left_out": tuple(spikes.events)},
        needs=frozenset(),
    )
