"""Anomalies: finished steps that a person should look at, in a list of events on the run's first rank."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.core.config import ConfigError, constant
from modelwright.core.records import EventLog
from modelwright.train.technique import EMPTY_BATCH, LOSS_SPIKE, NOT_FINITE, Runtime, StepInfo, Technique
from modelwright.train.techniques.loss_spikes import RecentValues

SKIPPED = {
    NOT_FINITE: ("nonfinite_step", "values not finite"),
    EMPTY_BATCH: ("empty_step", "the whole batch has nothing to learn from"),
    LOSS_SPIKE: ("skipped_spike", "a spike"),
}
"""The kind of event and the text for each reason to skip an update."""


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig:
    """Thresholds at which a step is reported as an anomaly."""

    num_sigmas: float = constant(6.0)
    """Robust standard deviations above the median at which a loss or gradient norm is reported."""
    window_steps: int = constant(60)
    """Preceding steps that a step is compared with; no step is judged before a third of them."""
    min_rise: float = constant(0.1)
    """Least relative rise over the median of an outlier."""
    stall_fraction: float = constant(0.5)
    """A step is a data stall if it waits for data for more than this fraction of its time and for `stall_s`."""
    stall_s: float = constant(0.5)
    """Least seconds of a data stall."""

    def __post_init__(self) -> None:
        if self.window_steps < 6:
            raise ConfigError(f"window_steps: must be at least 6 steps, got {self.window_steps}")


class AnomalyLog:
    """Finds loss spikes, gradient-norm outliers, skipped steps, data stalls and full memory in finished steps.

    For the first rank. Every event is one JSON line in `path` and one call of `note`. Events: step, kind, value, limit,
    text.
    """

    def __init__(self, path: Path, config: AnomalyConfig, *, note: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self.config = config
        self.note = note
        self.num_events: dict[str, int] = {}
        self._log = EventLog(path)
        self._recent = {kind: RecentValues(config.window_steps) for kind in ("loss_spike", "gradient_outlier")}

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._log.events

    def observe(self, info: StepInfo) -> None:
        if "out_of_memory" in info.scalars:
            rows = info.scalars["microbatch_rows"]
            text = f"out of memory; made again, and from here on, in microbatches of at most {rows:.0f} rows"
            self.report(info.step, "out_of_memory", info.scalars["out_of_memory"], 0.0, text)
        if info.skipped:
            kind, why = SKIPPED[info.skip_reason]
            if info.skip_reason == LOSS_SPIKE:
                why = f"{why}, loss {info.loss:.4g}, gradient norm {info.grad_norm:.4g}"
            self.report(info.step, kind, info.grad_norm, math.inf, f"update skipped: {why}")
            return  # its loss and norm must not enter the history
        self._judge(info.step, "loss_spike", info.loss, "loss")
        self._judge(info.step, "gradient_outlier", info.grad_norm, "gradient norm")
        limit = max(self.config.stall_s, self.config.stall_fraction * info.step_time_s)
        if info.data_wait_s > limit:
            text = f"waited {info.data_wait_s:.2f} s of {info.step_time_s:.2f} s for data"
            self.report(info.step, "data_stall", info.data_wait_s, limit, text)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._log.state_dict(),
            "num_events": dict(self.num_events),
            "recent": {kind: recent.state_dict() for kind, recent in self._recent.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._log.load_state_dict(state)
        self.num_events = dict(state["num_events"])
        for kind, recent in self._recent.items():
            recent.load_state_dict(state["recent"][kind])

    def _judge(self, step: int, kind: str, value: float, name: str) -> None:
        """Report an outlier relative to the preceding steps."""
        recent = self._recent[kind]
        if level := recent.level:
            limit = max(level.upper_limit(self.config.num_sigmas, 0.0), level.median * (1 + self.config.min_rise))
            if value > limit:
                self.report(step, kind, value, limit, f"{name} {value:.4g} against a median of {level.median:.4g}")
        recent.add(step, value)  # outliers too, so that a new level becomes normal after some steps

    def report(self, step: int, kind: str, value: float, limit: float, text: str) -> None:
        """Add an event, from here or from another monitor."""
        self.num_events[kind] = self.num_events.get(kind, 0) + 1
        if self._log.append(step=step, kind=kind, value=value, limit=limit, text=text):
            self.note(f"watch: step {step}: {text}")


def anomaly_monitor(log: AnomalyLog | None, run: Runtime) -> Technique | None:
    """Returns None on all ranks but the first, which alone has a log."""
    if log is None:
        return None
    return Technique(
        name="anomalies",
        on_step_end=log.observe,
        state=log,
        summary=lambda: {"num_events": dict(log.num_events)},
        needs=frozenset(),
    )
