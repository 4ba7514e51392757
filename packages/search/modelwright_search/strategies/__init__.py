"""The strategies of the search: `STRATEGIES` is the only list of them, and other packages add theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelwright.core.config import ConfigError, did_you_mean
from modelwright.core.extensions import installed
from modelwright_search.strategies.optuna_studies import HALVING, RANDOM, TPE
from modelwright_search.strategies.reinforce import REINFORCE
from modelwright_search.strategies.scaled import SCALED
from modelwright_search.workbench import SearchStrategy

GROUP = "modelwright.search_strategies"
"""Group of other packages' entry points, each a `SearchStrategy`."""

STANDARD = "standard"
"""Name of the run's own shape and settings, which are part of every search."""

STRATEGIES = {strategy.name: strategy for strategy in (HALVING, TPE, RANDOM, SCALED, REINFORCE)}


def known_strategies() -> Mapping[str, SearchStrategy]:
    """Returns the package's strategies and those of installed packages, which have the name of their entry point."""
    added = installed(GROUP, SearchStrategy, taken=(*STRATEGIES, STANDARD))
    return {**STRATEGIES, **{name: replace(strategy, name=name) for name, strategy in added.items()}}


def strategies_of(names: Sequence[str], *, shapes: bool, budget: float) -> list[SearchStrategy]:
    """Returns the strategies with these names, in this order. shapes: True if the space is one of shapes. Raises
    `ConfigError` for a name that is unknown, is given twice, or does not suit the space or the budget.
    """
    known = known_strategies()
    if not names:
        raise ConfigError(f"--strategies: names none of {', '.join(known)}")
    for number, name in enumerate(names):
        if name not in known:
            raise ConfigError(f"--strategies: {name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}")
        if name in names[:number]:
            raise ConfigError(f"--strategies: {name} is named twice")
        if known[name].needs_shapes and not shapes:
            raise ConfigError(f"--strategies: {name} works on shapes of models; leave it out of this space")
        if budget < known[name].min_budget:
            raise ConfigError(
                f"--budget: {name} needs at least {known[name].min_budget:g}, got {budget:g}; raise it, or choose "
                "other --strategies"
            )
    return [known[name] for name in names]
