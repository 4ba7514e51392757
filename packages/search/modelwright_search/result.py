"""What a search has found: the best of each strategy, repeated with other seeds, the winner among them, and its latency
measured again.

The best of many trials is partly the luckiest. So each strategy's best candidate is trained again with other seeds, and
the winner is chosen by the mean over all of them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelwright.core.config import merge
from modelwright.core.errors import ModelwrightError
from modelwright.model.config import ModelConfig
from modelwright_search.candidates import NUM_APPEALS, Candidates
from modelwright_search.config import SearchConfig
from modelwright_search.workbench import SearchFinding, ServingLimits, Trial, Workbench

PROMISE_MARGIN = 0.1
"""By which the latency of the winner may differ from what was measured when it was tried."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A strategy with its best candidate. losses: held-out, of the best trial and of its repetitions with other seeds,
    None for one that failed; empty without a best trial. finding: what the strategy adds to the report.
    """

    bench: Workbench
    losses: Sequence[float | None]
    finding: SearchFinding | None

    @property
    def best(self) -> Trial | None:
        """The trial of full length with the lowest loss, None without one."""
        return best_of(self.bench)

    @property
    def mean_loss(self) -> float:
        """Infinite if a training failed."""
        losses = [loss for loss in self.losses if loss is not None]
        return statistics.mean(losses) if losses and len(losses) == len(self.losses) else math.inf


def best_of(bench: Workbench) -> Trial | None:
    """The trial of full length with the lowest loss, None without one."""
    full = [trial for trial in bench.trials if trial.is_full]
    return min(full, key=lambda trial: (trial.loss, trial.latency_ms), default=None)


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
    """The end of a search. contenders: the run's own model first; promise: of the winner; standard_promise: of the
    run's own model, which says how much the machine itself has changed; config: settings of a run with the winner, in
    plain form.
    """

    limits: ServingLimits
    budget: float
    contenders: Sequence[Contender]
    winner: Contender
    promise: Promise
    standard_promise: Promise
    config: dict[str, Any]

    @property
    def trials(self) -> list[Trial]:
        return [trial for one in self.contenders for trial in one.bench.trials]

    @property
    def findings(self) -> list[SearchFinding]:
        return [one.finding for one in self.contenders if one.finding]

    @property
    def frontier(self) -> list[Trial]:
        """The trials of full length than which none is better in loss or latency and at least as good in the other, the
        fastest first.
        """
        best: list[Trial] = []
        full = (trial for trial in self.trials if trial.is_full)
        for trial in sorted(full, key=lambda trial: (trial.latency_ms, trial.loss)):
            if not best or (trial.loss or 0.0) < (best[-1].loss or 0.0):
                best.append(trial)
        return best


def judge(
    searched: Mapping[str, tuple[Workbench, SearchFinding | None]], wish: SearchConfig, limits: ServingLimits
) -> SearchResult:
    """Repeat the best of each strategy, choose the winner and measure its latency in a fresh engine. searched: by
    strategy, the run's own model first. Raises `ModelwrightError` if no candidate within the limits was trained.
    """
    contenders: list[Contender] = []
    for bench, finding in searched.values():
        losses, best = list[float | None](), best_of(bench)
        if best is not None:  # nothing is charged for repetitions
            seeds = range(1, wish.num_repetitions + 1)
            losses = [best.loss, *(bench.train(best.choices, 1.0, seed) for seed in seeds)]
        contenders.append(Contender(bench=bench, losses=losses, finding=finding))
    eligible = [one for one in contenders if one.best is not None and limits.allow(one.best)]
    if not eligible:
        raise ModelwrightError(
            f"no candidate within {limits.latency_ms:.3g} ms a token and {limits.num_parameters:,} parameters was "
            "trained; raise --max-latency-ms, --max-parameters or --budget, or name smaller values with --space"
        )
    winner = min(eligible, key=lambda one: one.mean_loss)
    assert winner.best is not None
    candidates, space = winner.bench.candidates, winner.bench.space
    chosen = space.candidate(winner.best.choices)
    run, stage = candidates.config, candidates.config.trainings[0].name
    return SearchResult(
        limits=limits,
        budget=wish.budget,
        contenders=contenders,
        winner=winner,
        promise=promise_of(candidates, chosen.model),
        standard_promise=promise_of(candidates, space.standard.model),
        config=merge(run.plain(), {"name": f"{run.name}-searched", **space.settings(chosen, stage)}),
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
