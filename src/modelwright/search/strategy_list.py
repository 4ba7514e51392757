"""The strategies: the only list of them, and those that other packages add."""

from collections.abc import Sequence
from importlib.metadata import entry_points

from modelwright.core.errors import ConfigError
from modelwright.core.suggest import did_you_mean
from modelwright.search.strategies.halving import HALVING
from modelwright.search.strategies.random_draws import RANDOM
from modelwright.search.strategies.reinforce import REINFORCE
from modelwright.search.strategies.scaled import SCALED
from modelwright.search.strategies.supernet import SUPERNET
from modelwright.search.strategies.tpe import TPE
from modelwright.search.strategy import SearchStrategy

GROUP = "modelwright.search_strategies"
"""Entry points of other packages, each a `SearchStrategy`."""

STRATEGIES: tuple[SearchStrategy, ...] = (TPE, RANDOM, HALVING, SCALED, SUPERNET, REINFORCE)
DEFAULT = ("tpe", "random", "halving", "scaled")
"""Those that run unless others are named, as far as they go with the space."""


def known_strategies() -> tuple[SearchStrategy, ...]:
    """The package's own and those of installed packages. Raises `ConfigError` for an entry point that is none."""
    added: list[SearchStrategy] = []
    for entry_point in entry_points(group=GROUP):
        strategy = entry_point.load()
        if not isinstance(strategy, SearchStrategy):
            raise ConfigError(
                f"{entry_point.value}: the entry point of {GROUP} must be a SearchStrategy, got {strategy!r}"
            )
        added.append(strategy)
    return (*STRATEGIES, *added)


def strategies_of(names: Sequence[str], *, shapes: bool) -> list[SearchStrategy]:
    """The strategies with these names, in their order, or those of `DEFAULT`. shapes: whether the space is one of
    shapes. Raises `ConfigError` for a name that is unknown or does not go with the space.
    """
    known = {strategy.name: strategy for strategy in known_strategies()}
    names = names or [name for name in DEFAULT if shapes or not known[name].needs_shapes]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"--strategies: {wrong[0]!r} is not one of {', '.join(known)}{did_you_mean(wrong[0], known)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--strategies: one is named twice: {', '.join(names)}")
    chosen = [known[name] for name in names]
    if misfits := [strategy.name for strategy in chosen if strategy.needs_shapes and not shapes]:
        raise ConfigError(f"--strategies: {misfits[0]} works on shapes of models; leave it out of this space")
    return chosen
