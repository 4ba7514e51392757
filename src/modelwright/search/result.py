"""What a search has found: the best of each strategy, repeated with other seeds, the winner among them, and its latency
measured again.

The best of many trials is partly the luckiest. So each strategy's best candidate is trained again with other seeds, and
the winner is chosen by the mean over all of them.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelwright.core.config import merge
from modelwright.core.errors import ModelwrightError
from modelwright.model.config import ModelConfig
from modelwright.search.candidates import NUM_APPEALS, Candidates
from modelwright.search.strategy import SearchFinding, SearchStrategy
from modelwright.search.trial import ServingLimits, Trial
from modelwright.search.workbench import Workbench

PROMISE_MARGIN = 0.1
"""By which the latency of the winner may differ from what was measured when it was tried."""


@dataclass(frozen=True)
class Searched:
    """A strategy and what it did."""

    strategy: SearchStrategy
    bench: Workbench

    @property
    def best(self) -> Trial | None:
        """The trial of full length with the lowest loss, None without one."""
        full = [trial for trial in self.bench.trials if trial.is_full]
        return min(full, key=lambda trial: (trial.loss, trial.latency_ms), default=None)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A strategy's best candidate. num_refused: beyond the limits, and so not trained. losses: held-out, of the trial
    and of its repetitions with other seeds, None for one that failed.
    """

    strategy: SearchStrategy
    num_trained: int
    num_refused: int
    spent: float
    best: Trial | None
    losses: Sequence[float | None]

    @property
    def mean_loss(self) -> float:
        """Infinite if a training failed."""
        losses = [loss for loss in self.losses if loss is not None]
        return statistics.mean(losses) if losses and len(losses) == len(self.losses) else math.inf


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A latency in milliseconds a token: when a candidate was tried, and again at the end in a fresh engine."""

    promised_ms: float
    measured_ms: float

    @property
    def ratio(self) -> float:
        return self.measured_ms / self.promised_ms

    @property
    def is_kept(self) -> bool:
        """Whether the two differ by no more than `PROMISE_MARGIN`."""
        return abs(self.ratio - 1.0) <= PROMISE_MARGIN


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The end of a search. frontier: trials than which none has both a lower loss and a lower latency, the fastest
    first; promise: of the winner; standard_promise: of the run's own model, which says how much the machine itself has
    changed; findings: what strategies add; config: settings of a run with the winner, in plain form.
    """

    limits: ServingLimits
    budget: float
    contenders: Sequence[Contender]
    trials: Sequence[Trial]
    frontier: Sequence[Trial]
    winner: Contender
    promise: Promise
    standard_promise: Promise
    findings: Sequence[SearchFinding]
    config: dict[str, Any]


def judge(
    searched: Sequence[Searched], candidates: Candidates, limits: ServingLimits, num_repetitions: int
) -> SearchResult:
    """Repeat the best of each strategy, choose the winner and measure its latency in a fresh engine. The first of
    `searched` is the run's own model. Raises `ModelwrightError` if no candidate within the limits was trained.
    """
    contenders = [contender_of(one, num_repetitions) for one in searched]
    eligible = [one for one in contenders if one.best is not None and limits.allow(one.best)]
    if not eligible:
        raise ModelwrightError(
            f"no candidate within {limits.latency_ms:.3g} ms a token and {limits.num_parameters:,} parameters was "
            "trained; raise --max-latency-ms, --max-parameters or --budget, or name smaller values with --space"
        )
    winner = min(eligible, key=lambda one: one.mean_loss)
    assert winner.best is not None
    space = searched[0].bench.space
    chosen = space.candidate(winner.best.choices)
    trials = [trial for one in searched for trial in one.bench.trials]
    findings = [one.strategy.conclude(one.bench, trials) for one in searched if one.strategy.conclude]
    plain, stage = candidates.config.plain(), candidates.config.trainings[0].name
    changes = {"name": f"{candidates.config.name}-searched", **space.settings(chosen, stage)}
    return SearchResult(
        limits=limits,
        budget=searched[-1].bench.budget,
        contenders=contenders,
        trials=trials,
        frontier=frontier(trials),
        winner=winner,
        promise=promise_of(candidates, chosen.model),
        standard_promise=promise_of(candidates, space.standard.model),
        findings=findings,
        config=merge(plain, changes),
    )


def promise_of(candidates: Candidates, shape: ModelConfig) -> Promise:
    """A shape's latency, and a new measurement of it, in a fresh engine; in further ones while it is slower than the
    promise allows, because what else the machine does only ever adds time.
    """
    promise = Promise(promised_ms=candidates.latency_ms(shape), measured_ms=candidates.measure(shape))
    for _ in range(NUM_APPEALS):
        if promise.is_kept or promise.ratio < 1.0:
            break
        promise = replace(promise, measured_ms=min(promise.measured_ms, candidates.measure(shape)))
    return promise


def contender_of(one: Searched, num_repetitions: int) -> Contender:
    """A strategy's best candidate, trained again with other seeds, which nothing is charged for."""
    best, losses = one.best, list[float | None]()
    if best is not None:
        losses = [best.loss, *(one.bench.train(best.choices, 1.0, seed) for seed in range(1, num_repetitions + 1))]
    return Contender(
        strategy=one.strategy,
        num_trained=one.bench.num_trained,
        num_refused=len(one.bench.trials) - one.bench.num_trained,
        spent=one.bench.spent,
        best=best,
        losses=losses,
    )


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """The trials of full length than which none is better in loss or latency and at least as good in the other."""
    full = sorted((trial for trial in trials if trial.is_full), key=lambda trial: (trial.latency_ms, trial.loss))
    best: list[Trial] = []
    for trial in full:
        assert trial.loss is not None
        if not best or trial.loss < (best[-1].loss or 0.0):
            best.append(trial)
    return best
