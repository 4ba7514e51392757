"""A weighted sum of rewards that goes on when one of them fails, and the metrics of its terms."""

import math
import statistics
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from modelwright.core.errors import STOPPING, ModelwrightError
from modelwright.reward.reward import Reward, Sample, Score

MAX_LOGGED = 20
"""Failures of a term that are logged with their details; the metrics count all."""


@dataclass(frozen=True)
class Term:
    reward: Reward
    weight: float


@dataclass(frozen=True)
class ScoredSamples:
    """What a sum made of some samples. A sample of which one term failed has a failed score: do not train on it. A term
    of weight 0 is only measured, and fails nothing."""

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
            result[f"rewards/{name}/mean"] = _mean(values)
            result[f"rewards/{name}/std"] = _deviation(values)
            result[f"rewards/{name}/failures"] = float(len(scores) - len(values))
            outcomes = Counter(score.outcome for score in scores if score.outcome)
            result |= {f"rewards/{name}/count/{label}": float(count) for label, count in outcomes.items()}
        return result


@dataclass
class WeightedSum:
    """The sum of weighted rewards; itself a `Reward`. log: takes the details of failures, one text each."""

    terms: Sequence[Term]
    name: str = "sum"
    log: Callable[[str], None] = lambda text: None
    num_logged: Counter[str] = field(default_factory=Counter[str])

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return list(self.evaluate(samples).scores)

    def evaluate(self, samples: Sequence[Sample]) -> ScoredSamples:
        """The scores of all terms. A term that raises fails the samples; what a user did, such as a missing kernel
        feature, and a request to stop are raised.
        """
        by_term = {term.reward.name: self._term_scores(term.reward, samples) for term in self.terms}
        rows = list(zip(*by_term.values(), strict=True)) if samples else []
        return ScoredSamples([self._total(row) for row in rows], by_term)

    def _total(self, row: Sequence[Score]) -> Score:
        counted = [(term, score) for term, score in zip(self.terms, row, strict=True) if term.weight]
        for term, score in counted:
            if score.failed:
                return Score.failure(f"{term.reward.name}/{score.outcome}", score.detail)
        return Score(math.fsum(term.weight * score.value for term, score in counted))

    def _term_scores(self, reward: Reward, samples: Sequence[Sample]) -> list[Score]:
        try:
            scores = reward.score(samples)
        except (*STOPPING, ModelwrightError):
            raise
        except Exception as error:
            scores = [Score.failure(type(error).__name__, traceback.format_exc())] * len(samples)
        if len(scores) != len(samples):
            text = f"it returned {len(scores)} scores for {len(samples)} samples"
            scores = [Score.failure("wrong_count", text)] * len(samples)
        scores = [_checked(score) for score in scores]
        for score in scores:
            self._log(reward.name, score)
        return scores

    def _log(self, name: str, score: Score) -> None:
        if score.failed and self.num_logged[name] < MAX_LOGGED:
            self.num_logged[name] += 1
            self.log(f"reward {name}: no score for a sample ({score.outcome}): {score.detail.strip()}")


def _checked(score: Score) -> Score:
    if score.failed or math.isfinite(score.value):
        return score
    return Score.failure("not_finite", f"the value is {score.value}")


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (divisor n - 1), as TRL logs it; 0 for one value."""
    if len(values) < 2:
        return 0.0 if values else math.nan
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
