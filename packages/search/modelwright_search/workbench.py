"""`SearchStrategy`, a way to search, and `Workbench`, on which it tries candidates until its budget is spent.

The unit of the budget is the cost of a training of the run's own model, so that a strategy may train many small
candidates or few large ones, some of them briefly, and all strategies spend the same amount.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelwright.core.config import ConfigError, derive_seed, digest
from modelwright_search.candidates import Candidates
from modelwright_search.space import Choices, Space

LATENCY, PARAMETERS, DIVERGED, ILLEGAL = "latency", "parameters", "diverged", "illegal"
"""Reasons why a trial lacks a loss: it exceeds a limit, its training failed, or its choices are invalid."""
MAX_REFUSALS = 500
"""Number of candidates beyond the limits, or tried before, that a strategy may propose: in a space with few legal
candidates it would otherwise never end."""
TOLERANCE = 1e-9
"""Rounding error by which a sum of costs may exceed the budget."""


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """Limits on a candidate in serving: milliseconds for a decoded token, and parameters."""

    latency_ms: float = math.inf
    num_parameters: float = math.inf

    def allow(self, trial: "Trial") -> bool:
        """Returns True if a trial whose latency was measured is within both limits."""
        return trial.latency_ms <= self.latency_ms and trial.num_parameters <= self.num_parameters


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate that a strategy proposed, and its figures.

    share: trained share of the full length; latency_ms: measured latency, 0 if the candidate exceeded another limit;
    loss: held-out loss in nats per token, None if it was not trained or failed; cost: training FLOPs, in trainings of
    the run's own model; reason: reason for a missing loss.
    """

    number: int
    strategy: str
    choices: Choices
    share: float
    num_parameters: int
    latency_ms: float
    loss: float | None
    cost: float
    reason: str

    @property
    def is_full(self) -> bool:
        """True if it was trained for the full length, so that its loss compares with those of others."""
        return self.loss is not None and self.share == 1.0


@dataclass(kw_only=True)
class Workbench:
    """A strategy's view of the search. budget: cost that it may spend; trials: its trials so far, in order."""

    strategy: str
    space: Space
    candidates: Candidates
    limits: ServingLimits
    budget: float
    trials: list[Trial] = field(default_factory=list[Trial])
    num_refused: int = 0

    @property
    def seed(self) -> int:
        """Seed of everything random in the strategy."""
        return derive_seed(self.candidates.config.seed, "search", self.strategy)

    @property
    def spent(self) -> float:
        return sum(trial.cost for trial in self.trials)

    @property
    def num_trained(self) -> int:
        """Number of trials within the limits."""
        return sum(trial.cost > 0 for trial in self.trials)

    @property
    def left(self) -> float:
        return self.budget - self.spent

    def cost(self, choices: Choices, share: float = 1.0) -> float:
        """Computes the cost of a training of this share of the full length, in trainings of the run's own model. Raises
        `ConfigError` for invalid choices.
        """
        full = self.candidates.flops(self.space.standard, 1.0)
        return self.candidates.flops(self.space.candidate(choices), share) / full

    def find(self, choices: Choices, share: float) -> Trial | None:
        """Returns this strategy's earlier trial of these choices; None without one."""
        same = (trial for trial in self.trials if dict(trial.choices) == dict(choices) and trial.share == share)
        return next(same, None)

    def try_out(self, choices: Choices, share: float = 1.0, *, reserve: float = 0.0) -> Trial | None:
        """Measures a candidate and trains it for a share of the full length. A candidate beyond the limits is not
        trained and costs nothing; one that was tried before is not trained again. Returns None when the budget no
        longer allows the trial. reserve: further share that the budget must allow for the candidate's later trainings.
        """
        if known := self.find(choices, share):
            self.num_refused += 1
            return known if self.num_refused <= MAX_REFUSALS else None
        reason, latency_ms, num_parameters = self.refusal(choices)
        if reason:
            self.num_refused += 1
            if self.num_refused > MAX_REFUSALS:
                return None
        elif self.cost(choices, share + reserve) > self.left + TOLERANCE:
            return None
        loss = None if reason else self.train(choices, share)
        trial = Trial(
            number=len(self.trials),
            strategy=self.strategy,
            choices=dict(choices),
            share=share,
            num_parameters=num_parameters,
            latency_ms=latency_ms,
            loss=loss,
            cost=0.0 if reason else self.cost(choices, share),
            reason=reason or ("" if loss is not None else DIVERGED),
        )
        # A strategy that is not deterministic, or has changed, would take over the result of another candidate.
        record = self.candidates.journal.once("trial", f"{self.strategy}/{trial.number}", lambda: vars(trial))
        known = Trial(**{name: record[name] for name in vars(trial)})
        if digest([dict(known.choices), known.share]) != digest([dict(trial.choices), trial.share]):
            raise ConfigError(
                f"{self.candidates.folder}: trial {trial.number} of {trial.strategy} was {dict(known.choices)}, and "
                f"would be {dict(trial.choices)} now: the strategy or a package has changed; search again with "
                "--restart, or with another --run-dir"
            )
        self.trials.append(known)
        return known

    def train(self, choices: Choices, share: float, seed: int = 0) -> float | None:
        """Trains a candidate; returns its held-out loss, None if the training failed. seed: 0, or the number of a
        repetition with other initial weights and another order of rows.
        """
        name = f"{self.strategy} {len(self.trials) + 1}"
        return self.candidates.train(self.space.candidate(choices), share, seed, name)

    def refusal(self, choices: Choices) -> tuple[str, float, int]:
        """Returns why a candidate is not trained ("" if it is), its latency (0 unless it had to be measured) and its
        number of parameters. The cheap limit comes first.
        """
        try:
            model = self.space.candidate(choices).model
        except ConfigError:
            return ILLEGAL, 0.0, 0
        num_parameters = model.num_parameters
        if num_parameters > self.limits.num_parameters:
            return PARAMETERS, 0.0, num_parameters
        latency_ms = self.candidates.latency_ms(model, self.limits.latency_ms)
        return (LATENCY if latency_ms > self.limits.latency_ms else ""), latency_ms, num_parameters


@dataclass(frozen=True, kw_only=True)
class SearchFinding:
    """A strategy's addition to the report. name: key in the JSON; figures: plain data; text: one line."""

    name: str
    figures: Mapping[str, Any]
    text: str


@dataclass(frozen=True, kw_only=True)
class SearchStrategy:
    """A way to search. Packages add strategies as entry points of the group `modelwright.search_strategies`."""

    name: str
    """Name on the command line and in the report."""
    run: Callable[[Workbench], SearchFinding | None]
    """Tries candidates until the budget is spent. It must be a deterministic function of `Workbench.seed` and of the
    results of its trials: a search that was killed runs it again from the start, with the results in the journal."""
    needs_shapes: bool = False
    """True if it works only on the shape of a model, not on hyperparameters."""
    min_budget: float = 1.0
    """Least budget with which it trains a candidate as large as the run's own model for the full length."""
