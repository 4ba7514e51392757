"""A trial: one candidate that a strategy proposed, and what became of it."""

from dataclasses import dataclass
from typing import Any

from modelwright.search.space import Choices

LATENCY, PARAMETERS, DIVERGED, ILLEGAL = "latency", "parameters", "diverged", "illegal"
"""Reasons for which a trial has no loss: it exceeds a limit, its training failed, or it is no model at all."""


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """What a candidate may need when it serves."""

    latency_ms: float
    """Milliseconds for a decoded token."""
    num_parameters: int

    def allow(self, trial: "Trial") -> bool:
        """Whether a trial whose latency was measured is within both."""
        return trial.latency_ms <= self.latency_ms and trial.num_parameters <= self.num_parameters


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate's figures.

    share: of the full length of a training. seed: 0, or the number of a repetition with other initial weights and
    another order of rows. latency_ms: measured, 0 if the candidate exceeded another limit. loss: held-out, in nats per
    token, None without one. cost: training FLOPs, in trainings of the run's own model. reason: why there is no loss.
    """

    number: int
    strategy: str
    choices: Choices
    share: float
    seed: int
    num_parameters: int
    latency_ms: float
    loss: float | None
    cost: float
    reason: str

    @property
    def is_full(self) -> bool:
        """Whether it was trained for the full length, so that its loss compares with those of others."""
        return self.loss is not None and self.share == 1.0

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Trial":
        """From a line of the journal."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})
