"""`SearchStrategy`, one way to search, and `Workbench`, on which it tries candidates until its budget is spent.

The budget is training cost in trainings of the run's own model, so that a strategy may train many small candidates or
few large ones, some of them briefly, and all strategies spend equally much.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelwright.core.config import digest
from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright_search.candidates import Candidates
from modelwright_search.space import Choices, Space

LATENCY, PARAMETERS, DIVERGED, ILLEGAL = "latency", "parameters", "diverged", "illegal"
"""Reasons for which a trial has no loss: it exceeds a limit, its training failed, or its choices make no model."""
MAX_REFUSALS = 500
"""Candidates beyond the limits, or tried before, that a strategy may propose: in a space with few legal candidates it
would otherwise go on forever."""
TOLERANCE = 1e-9
"""By which sums of costs may exceed the budget, for rounding."""


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """What a candidate may need when it serves: milliseconds for a decoded token, and parameters."""

    latency_ms: float = math.inf
    num_parameters: float = math.inf

    def allow(self, trial: "Trial") -> bool:
        """Whether a trial whose latency was measured is within both."""
        return trial.latency_ms <= self.latency_ms and trial.num_parameters <= self.num_parameters


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate that a strategy proposed, and its figures.

    share: of the full length of a training. latency_ms: measured, 0 if the candidate exceeded another limit. loss:
    held-out, in nats per token, None without one. cost: training FLOPs, in trainings of the run's own model. reason:
    why there is no loss.
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
        """Whether it was trained for the full length, so that its loss compares with those of others."""
        return self.loss is not None and self.share == 1.0


@dataclass(kw_only=True)
class Workbench:
    """One strategy's view of the search. budget: what it may spend; trials: what it has tried, in order."""

    strategy: str
    space: Space
    candidates: Candidates
    limits: ServingLimits
    budget: float
    trials: list[Trial] = field(default_factory=list[Trial])
    num_refused: int = 0

    @property
    def seed(self) -> int:
        """The seed of everything random in the strategy."""
        return derive_seed(self.candidates.config.seed, "search", self.strategy)

    @property
    def spent(self) -> float:
        return sum(trial.cost for trial in self.trials)

    @property
    def num_trained(self) -> int:
        """Trials within the limits."""
        return sum(trial.cost > 0 for trial in self.trials)

    @property
    def left(self) -> float:
        return self.budget - self.spent

    def cost(self, choices: Choices, share: float = 1.0) -> float:
        """What a training of this share of the full length costs, in trainings of the run's own model. Raises
        `ConfigError` for choices that make no model.
        """
        full = self.candidates.flops(self.space.standard, 1.0)
        return self.candidates.flops(self.space.candidate(choices), share) / full

    def find(self, choices: Choices, share: float) -> Trial | None:
        """The trial that this strategy has made of these choices, None if it has made none."""
        same = (trial for trial in self.trials if dict(trial.choices) == dict(choices) and trial.share == share)
        return next(same, None)

    def try_out(self, choices: Choices, share: float = 1.0, *, reserve: float = 0.0) -> Trial | None:
        """Measure and train a candidate for a share of the full length. One beyond the limits is not trained and costs
        nothing; one that was tried before is not trained again. None when the budget does not allow it any more.
        reserve: share of the full length that the budget must allow besides, for the candidate's further trainings.
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
        """The held-out loss of a candidate, None if its training failed. seed: 0, or the number of a repetition with
        other initial weights and another order of rows.
        """
        name = f"{self.strategy} {len(self.trials) + 1}"
        return self.candidates.train(self.space.candidate(choices), share, seed, name)

    def refusal(self, choices: Choices) -> tuple[str, float, int]:
        """Why a candidate is not trained ("" for one that is), its latency, 0 unless it had to be measured, and its
        parameters. The cheap limit comes first.
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
    """What a strategy adds to the report. name: its key in the JSON; figures: plain data; text: one line."""

    name: str
    figures: Mapping[str, Any]
    text: str


@dataclass(frozen=True, kw_only=True)
class SearchStrategy:
    """One way to search. A package adds one as an entry point of the group `modelwright.search_strategies`."""

    name: str
    """On the command line and in the report."""
    run: Callable[[Workbench], SearchFinding | None]
    """Tries candidates until the budget is spent. It must be a deterministic function of `Workbench.seed` and of what
    its trials return: a search that was killed runs it again from the start, with the results that the journal has."""
    needs_shapes: bool = False
    """Whether it works on the shape of a model alone, not on hyperparameters."""
    min_budget: float = 1.0
    """The least budget with which it trains a candidate as large as the run's own for the full length."""
