"""Strategies by Optuna, in this process: its samplers propose candidates, its pruner ends those that fall behind.

The study is in memory. A search that was killed replays its trials from the journal, with the same seed, so that Optuna
repeats its proposals.
"""

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from modelwright_search.workbench import SearchStrategy, Workbench

NUM_STARTUP = 5
"""Number of random trials before the Parzen estimator; less than Optuna's 10, as a budget here is a few trainings."""
RUNGS = (0.25, 0.5, 1.0)
"""Lengths to which successive halving trains a candidate. Each training starts from scratch with a learning-rate
schedule over its whole length, so that losses within a rung compare; the cost of the shorter rungs is charged, too."""
REDUCTION = 2
"""A candidate goes to the next rung if it is in the better half of those that have come as far: a rung is twice as long
as the one before."""


def search_by(bench: Workbench, sampler: BaseSampler, rungs: Sequence[float] = (1.0,)) -> None:
    """Trains the sampler's proposals, rung by rung, while the budget allows a candidate on all rungs."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
    study, axes = optuna.create_study(sampler=sampler, pruner=pruner), bench.space.axes
    # Ordered values are numbered, so that neighbors count as near.
    distributions: dict[str, BaseDistribution] = {
        axis.name: IntDistribution(0, len(axis.values) - 1) if axis.is_ordered else CategoricalDistribution(axis.values)
        for axis in axes
    }
    while True:
        asked = study.ask(distributions)
        params: dict[str, Any] = asked.params
        choices = {axis.name: axis.values[params[axis.name]] if axis.is_ordered else params[axis.name] for axis in axes}
        for rung, share in enumerate(rungs):
            trial = bench.try_out(choices, share, reserve=sum(rungs[rung + 1 :]))
            if trial is None:
                return
            if trial.loss is None:  # beyond a limit, or diverged: counted among the bad ones, without a value
                study.tell(asked, state=TrialState.PRUNED)
                break
            if share == rungs[-1]:
                study.tell(asked, trial.loss)
                break
            asked.report(trial.loss, step=REDUCTION**rung)  # the resource at which the pruner has this rung
            if asked.should_prune():
                study.tell(asked, state=TrialState.PRUNED)
                break


def search_by_halving(bench: Workbench) -> None:
    """Runs asynchronous successive halving (Li et al. 2020, ASHA) on random candidates. The first are compared with
    few others, and the pruner never revives a candidate: the rest of the budget pays for the full length of ended
    candidates, those trained longest first, among equal ones the best first.
    """
    search_by(bench, RandomSampler(seed=bench.seed % 2**32), RUNGS)
    ended = [trial for trial in bench.trials if trial.loss is not None]
    for trial in sorted(ended, key=lambda trial: (-trial.share, trial.loss, trial.number)):
        if bench.find(trial.choices, 1.0) is None:
            bench.try_out(trial.choices)  # None where it costs more than is left: another one may not


def search_at_random(bench: Workbench) -> None:
    """Draws candidates evenly on each axis (Bergstra and Bengio 2012; Li and Talwalkar 2019): a baseline."""
    search_by(bench, RandomSampler(seed=bench.seed % 2**32))


def search_by_tpe(bench: Workbench) -> None:
    """Searches with the tree-structured Parzen estimator (Bergstra et al. 2011)."""
    search_by(bench, TPESampler(seed=bench.seed % 2**32, n_startup_trials=NUM_STARTUP))


HALVING = SearchStrategy(name="halving", run=search_by_halving, min_budget=sum(RUNGS))
RANDOM = SearchStrategy(name="random", run=search_at_random)
TPE = SearchStrategy(name="tpe", run=search_by_tpe)
