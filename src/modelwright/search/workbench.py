"""What a strategy works with: it tries candidates until its budget is spent.

The budget is training cost in trainings of the run's own model, so that a strategy may train many small candidates or
few large ones, some of them briefly, and all strategies spend equally much.
"""

from dataclasses import dataclass, field

from modelwright.core.config import digest
from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.search.candidates import Candidates
from modelwright.search.space import Choices, Space
from modelwright.search.trial import DIVERGED, ILLEGAL, LATENCY, PARAMETERS, ServingLimits, Trial

MAX_REFUSALS = 500
"""Candidates beyond the limits, or tried before, that a strategy may propose: in a space with few legal candidates it
would otherwise go on forever."""
TOLERANCE = 1e-9
"""By which sums of costs may exceed the budget, for rounding."""


@dataclass(kw_only=True)
class Workbench:
    """One strategy's view of the search. budget: what it may spend; trials: what it has tried, in order."""

    strategy: str
    space: Space
    candidates: Candidates
    limits: ServingLimits
    budget: float
    trials: list[Trial] = field(default_factory=list[Trial])
    extra_cost: float = 0.0
    """Spent on anything but trials, such as a supernet."""
    num_refused: int = 0

    @property
    def seed(self) -> int:
        """The seed of everything random in the strategy."""
        return derive_seed(self.candidates.config.seed, "search", self.strategy)

    @property
    def spent(self) -> float:
        return sum(trial.cost for trial in self.trials) + self.extra_cost

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

    def try_out(self, choices: Choices, share: float = 1.0) -> Trial | None:
        """Measure and train a candidate for a share of the full length. One beyond the limits is not trained and costs
        nothing; one that was tried before is not trained again. None when the budget does not allow it any more.
        """
        if known := self.find(choices, share):
            self.num_refused += 1
            return known if self.num_refused <= MAX_REFUSALS else None
        reason, latency_ms, num_parameters = self.refusal(choices)
        if reason:
            self.num_refused += 1
            if self.num_refused > MAX_REFUSALS:
                return None
        elif self.cost(choices, share) > self.left + TOLERANCE:
            return None
        return self._tried(choices, share, reason, latency_ms, num_parameters)

    def try_standard(self) -> Trial | None:
        """Train the run's own candidate for the full length, whatever the limits."""
        shape = self.space.standard.model
        latency_ms = self.candidates.latency_ms(shape)
        return self._tried(self.space.standard_choices, 1.0, "", latency_ms, shape.num_parameters)

    def _tried(self, choices: Choices, share: float, reason: str, latency_ms: float, num_parameters: int) -> Trial:
        """The next trial, in the journal. reason: why it is not trained, "" for one that is."""
        loss = None if reason else self.train(choices, share)
        trial = Trial(
            number=len(self.trials),
            strategy=self.strategy,
            choices=dict(choices),
            share=share,
            seed=0,
            num_parameters=num_parameters,
            latency_ms=latency_ms,
            loss=loss,
            cost=0.0 if reason else self.cost(choices, share),
            reason=reason or ("" if loss is not None else DIVERGED),
        )
        return self._record(trial)

    def train(self, choices: Choices, share: float, seed: int = 0) -> float | None:
        """The held-out loss of a candidate, None if its training failed."""
        name = f"{self.strategy} {len(self.trials) + 1}"
        outcome = self.candidates.train(self.space.candidate(choices), share, seed, name)
        if outcome.problem:
            self.candidates.progress.note(f"{name}: {outcome.problem}")
        return outcome.loss

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

    def _record(self, trial: Trial) -> Trial:
        """Raises `ConfigError` if the journal has another trial at this place: the strategy has become another one."""
        key = f"{trial.strategy}/{trial.number}"
        known = Trial.from_record(dict(self.candidates.journal.once("trial", key, lambda: vars(trial))))
        if digest([dict(known.choices), known.share]) != digest([dict(trial.choices), trial.share]):
            raise ConfigError(
                f"{self.candidates.folder}: trial {trial.number} of {trial.strategy} was {dict(known.choices)}, and "
                f"would be {dict(trial.choices)} now: the strategy or a package has changed; search again with "
                "--restart, or with another --run-dir"
            )
        self.trials.append(known)
        return known
