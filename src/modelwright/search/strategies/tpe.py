"""Tree-structured Parzen estimator (Bergstra et al. 2011), by Optuna, in this process."""

from typing import Any

from modelwright.core.errors import ConfigError
from modelwright.search.space import Axis
from modelwright.search.strategy import SearchStrategy
from modelwright.search.workbench import Workbench

NUM_STARTUP = 5
"""Random trials before the estimator, of which Optuna makes 10: a budget here is a few trainings."""


def search_by_tpe(bench: Workbench) -> None:
    """Optuna asks, the workbench tries. The study lives in memory: a search that was killed replays its trials from the
    journal, with the same seed, so that Optuna proposes what it would have proposed. Raises `ConfigError` without
    Optuna.
    """
    optuna = _import_optuna()
    sampler = optuna.samplers.TPESampler(seed=bench.seed % 2**32, n_startup_trials=NUM_STARTUP)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    distributions = {axis.name: _distribution(optuna, axis) for axis in bench.space.axes}
    while True:
        asked = study.ask(distributions)
        choices = {axis.name: _value(axis, asked.params[axis.name]) for axis in bench.space.axes}
        trial = bench.try_out(choices)
        if trial is None:
            return
        if trial.loss is None:  # counted among the bad ones, without a value
            study.tell(asked, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(asked, trial.loss)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "--strategies: tpe needs the package optuna: pip install 'modelwright[search]', or choose other strategies"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, axis: Axis) -> Any:
    """Places of ordered values, so that neighbors count as near; other values as they are."""
    if axis.is_ordered:
        return optuna.distributions.IntDistribution(0, len(axis.values) - 1)
    return optuna.distributions.CategoricalDistribution(axis.values)


def _value(axis: Axis, param: Any) -> Any:
    return axis.values[param] if axis.is_ordered else param


TPE = SearchStrategy(name="tpe", summary="Optuna's tree-structured Parzen estimator", run=search_by_tpe)
