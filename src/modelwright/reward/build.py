"""Builds rewards from settings. `REWARDS` is the only list of the package's own kinds; other packages add theirs."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from modelwright.core.config import parse
from modelwright.core.errors import ConfigError
from modelwright.core.extensions import installed
from modelwright.reward.distinct_words import DistinctWordsConfig
from modelwright.reward.exact_match import ExactMatchConfig
from modelwright.reward.function import FunctionConfig
from modelwright.reward.json_format import JsonConfig
from modelwright.reward.length import LengthConfig
from modelwright.reward.numeric_match import NumericMatchConfig
from modelwright.reward.pattern import PatternConfig
from modelwright.reward.reward import RewardConfig
from modelwright.reward.weighted_sum import Term, WeightedSum

REWARDS: Mapping[str, type[RewardConfig]] = {
    "exact_match": ExactMatchConfig,
    "numeric_match": NumericMatchConfig,
    "pattern": PatternConfig,
    "length": LengthConfig,
    "distinct_words": DistinctWordsConfig,
    "json": JsonConfig,
    "function": FunctionConfig,
}
GROUP = "modelwright.rewards"
"""Entry points of other packages, each a class of `RewardConfig`."""
EXTRAS = {"code": "sandbox"}
"""Kinds of this project's other packages, and the extra that installs each."""


def build_reward(
    terms: Mapping[str, Any],
    *,
    kinds: Mapping[str, type[RewardConfig]] = REWARDS,
    path: str = "rewards",
    log: Callable[[str], None] = lambda text: None,
) -> WeightedSum:
    """The weighted sum of `terms`, which maps the name of each to its options, its `weight` (1 by default) and its
    `kind` (the name by default). path: of the terms in the config, for errors; log: receives the details of failures.

    Raises `ConfigError`, also for a kind that cannot work on this machine.
    """
    if not terms:
        raise ConfigError(f"{path}: needs at least one reward (known here: {', '.join(kinds)})")
    built: list[Term] = []
    for name, options in terms.items():
        place = f"{path}.{name}"
        if not isinstance(options, Mapping):
            text = f"{place}: expected the options of the reward, got {options!r}"
            raise ConfigError(f"{text}; write {{}} for the defaults")
        weight, kind = options.get("weight", 1.0), options.get("kind", name)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ConfigError(f"{place}.weight: must be a finite number, got {weight!r}")
        known: Mapping[str, type[RewardConfig]] = kinds
        if kind not in known:  # only then, because reading the metadata of all installed packages takes milliseconds
            known = {**kinds, **installed(GROUP, type, taken=tuple(kinds))}
        if kind in EXTRAS and kind not in known:
            raise ConfigError(
                f"{place}.kind: {kind!r} is in a separate package: pip install 'modelwright[{EXTRAS[kind]}]'"
            )
        if kind not in known:
            raise ConfigError(f"{place}.kind: {kind!r} is not one of {', '.join(known)}")
        config_class = known[kind]
        assert dataclasses.is_dataclass(config_class)
        config = parse(config_class, {key: options[key] for key in options if key not in ("weight", "kind")}, place)
        try:
            built.append(Term(config.build(name), float(weight)))
        except ConfigError as error:
            raise ConfigError(f"{place}.{error}") from error
    if not any(term.weight for term in built):
        raise ConfigError(f"{path}: every term has weight 0, so all answers would be equal; give one a weight")
    return WeightedSum(built, log=log)
