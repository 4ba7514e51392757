"""Successive halving (Jamieson and Talwalkar 2016) of random candidates.

The better half of a few candidates seldom costs exactly what a rung may spend. What the rungs leave over pays for the
full length of those that came next, so that the whole budget is spent as that of other strategies is.
"""

import random

from modelwright.search.strategy import SearchStrategy
from modelwright.search.trial import Trial
from modelwright.search.workbench import Workbench

SHARES = (0.25, 0.5, 1.0)
"""Lengths of the rungs. Each rung's trainings have a whole learning-rate schedule of their own length and start from
scratch, so that losses within a rung compare; what the shorter rungs cost is charged."""


def search_by_halving(bench: Workbench) -> None:
    """Each rung may spend an equal part of the budget, and hands on its better half. The rest of the budget goes to the
    full length of the next best, those of the longer rung first.
    """
    generator = random.Random(bench.seed)
    rung = _first_rung(bench, generator)
    rungs = [rung]
    for number, share in enumerate(SHARES[1:], start=1):
        limit = bench.budget * (number + 1) / len(SHARES)
        ranked = sorted(rung, key=lambda trial: (trial.loss, trial.number))
        rung = []
        for trial in ranked[: max(1, len(ranked) // 2)]:
            if rung and bench.spent + bench.cost(trial.choices, share) > limit:
                break
            tried = bench.try_out(trial.choices, share)
            if tried is not None and tried.loss is not None:  # None: dearer than what is left
                rung.append(tried)
        rungs.append(rung)
    for shorter in reversed(rungs[:-1]):
        for trial in sorted(shorter, key=lambda trial: (trial.loss, trial.number)):
            if bench.find(trial.choices, 1.0) is None:
                bench.try_out(trial.choices)  # None where it costs more than is left: another one may not


def _first_rung(bench: Workbench, generator: random.Random) -> list[Trial]:
    """Random candidates, while the first rung's part of the budget lasts."""
    rung: list[Trial] = []
    while bench.spent < bench.budget / len(SHARES):
        trial = bench.try_out(bench.space.draw(generator), SHARES[0])
        if trial is None:
            break
        if trial.loss is not None and trial not in rung:
            rung.append(trial)
    return rung


HALVING = SearchStrategy(
    name="halving",
    summary="random candidates, the better half trained twice as long",
    run=search_by_halving,
    is_baseline=True,
)
