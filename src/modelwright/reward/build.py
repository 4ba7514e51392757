"""The weighted sum of rewards, which survives the failure of one of them, and its construction from settings.
`REWARDS` is the only list of the package's own kinds; other packages add theirs.
"""

import dataclasses
import math
import statistics
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelwright.core.config import STOPPING, ConfigError, ModelwrightError, parse
from modelwright.core.extensions import installed
from modelwright.reward.distinct_words import DistinctWordsConfig
from modelwright.reward.exact_match import ExactMatchConfig
from modelwright.reward.function import FunctionConfig
from modelwright.reward.json_format import JsonConfig
from modelwright.reward.length import LengthConfig
from modelwright.reward.numeric_match import NumericMatchConfig
from modelwright.reward.pattern import PatternConfig
from modelwright.reward.reward import Reward, RewardConfig, Sample, Score

MAX_LOGGED = 20
"""Failures of a term that are logged with their details; the metrics count all."""


@dataclass(frozen=True)
class Term:
    reward: Reward
    weight: float


@dataclass(frozen=True)
class ScoredSamples:
    """Scores of some samples. A sample of which one term failed has a failed score: do not train on it. A term of
    weight 0 is only measured, and does not fail samples."""

    scores: Sequence[Score]
    terms: Mapping[str, Sequence[Score]]
    """The scores of each term, without its weight."""

    def metrics(self) -> dict[str, float]:
        """Metrics under the names of TRL: `reward`, and for each term `rewards/NAME/mean` and `rewards/NAME/std`.

        Also, by term: `rewards/NAME/failures`, and `rewards/NAME/count/OUTCOME` for each outcome that occurred.
        `reward/failures` counts the samples without a score. Means and deviations leave failures out.
        """
        values = [score.value for score in self.scores if not score.failed]
        result = {"reward": _mean(values), "reward/failures": float(len(self.scores) - len(values))}
        for name, scores in self.terms.items():
            values = [score.value for score in scores if not score.failed]
            mean = _mean(values)
            # Sample standard deviation (divisor n - 1), as TRL logs it; 0 for one value.
            deviation = 0.0 if values else math.nan
            if len(values) > 1:
                deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
            result[f"rewards/{name}/mean"] = mean
            result[f"rewards/{name}/std"] = deviation
            result[f"rewards/{name}/failures"] = float(len(scores) - len(values))
            outcomes = Counter(score.outcome for score in scores if score.outcome)
            result |= {f"rewards/{name}/count/{label}": float(count) for label, count in outcomes.items()}
        return result


@dataclass
class WeightedSum:
    """The sum of weighted rewards; itself a `Reward`. log: receives the details of failures, one text each."""

    terms: Sequence[Term]
    name: str = "sum"
    log: Callable[[str], None] = lambda text: None
    num_logged: Counter[str] = field(default_factory=Counter[str])

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return list(self.evaluate(samples).scores)

    def evaluate(self, samples: Sequence[Sample]) -> ScoredSamples:
        """Scores the samples by all terms. An exception of a term fails the samples, except a `ModelwrightError`, such
        as a missing kernel feature, and a request to stop, which are raised.
        """
        by_term: dict[str, list[Score]] = {}
        for reward in (term.reward for term in self.terms):
            try:
                scores = reward.score(samples)
            except (*STOPPING, ModelwrightError):
                raise
            except Exception as error:
                scores = [Score.failure(type(error).__name__, traceback.format_exc())] * len(samples)
            if len(scores) != len(samples):
                text = f"it returned {len(scores)} scores for {len(samples)} samples"
                scores = [Score.failure("wrong_count", text)] * len(samples)
            scores = [
                score
                if score.failed or math.isfinite(score.value)
                else Score.failure("not_finite", f"the value is {score.value}")
                for score in scores
            ]
            for score in scores:
                if score.failed and self.num_logged[reward.name] < MAX_LOGGED:
                    self.num_logged[reward.name] += 1
                    self.log(f"reward {reward.name}: no score for a sample ({score.outcome}): {score.detail.strip()}")
            by_term[reward.name] = scores
        totals: list[Score] = []
        for row in zip(*by_term.values(), strict=True) if samples else ():
            counted = [(term, score) for term, score in zip(self.terms, row, strict=True) if term.weight]
            failures = [(term.reward.name, score) for term, score in counted if score.failed]
            if failures:
                name, score = failures[0]
                totals.append(Score.failure(f"{name}/{score.outcome}", score.detail))
            else:
                totals.append(Score(math.fsum(term.weight * score.value for term, score in counted)))
        return ScoredSamples(totals, by_term)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


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
