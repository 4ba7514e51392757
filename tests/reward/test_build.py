"""Sums of rewards from settings: failures are counted and named, and the run goes on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelwright.core.config import ConfigError, Stopped
from modelwright.reward.build import MAX_LOGGED, REWARDS, Term, WeightedSum, build_reward
from modelwright.reward.reward import Reward, Sample, Score
from refusals import config_error
from reward_samples import sample


@dataclass(frozen=True, kw_only=True)
class VowelsConfig:
    """A kind that the package does not know."""

    vowels: str = "aeiou"
    values: tuple[float, ...] = ()

    def build(self, name: str) -> Reward:
        return Vowels(name, self)


@dataclass(frozen=True)
class Vowels:
    name: str
    config: VowelsConfig

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        if self.config.values:
            return [Score(value) for value in self.config.values]
        return [Score(sum(one.answer.count(vowel) for vowel in self.config.vowels)) for one in samples]


KINDS = {**REWARDS, "vowels": VowelsConfig}


def test_a_kind_from_outside_in_a_weighted_sum() -> None:
    terms = {"vowels": {"weight": 0.5}, "no_e": {"kind": "vowels", "vowels": "e", "weight": -1}, "exact_match": {}}
    reward = build_reward(terms, kinds=KINDS)
    result = reward.evaluate([sample("apple", answer="apple"), sample("kiwi", answer="apple")])
    assert [score.value for score in result.scores] == [0.5 * 2 - 1 + 1, 0.5 * 2]
    metrics = result.metrics()
    assert metrics["reward"] == 1.0
    assert metrics["reward/failures"] == 0
    assert (metrics["rewards/no_e/mean"], metrics["rewards/no_e/std"]) == (0.5, pytest.approx(0.5**0.5))
    assert metrics["rewards/exact_match/count/equal"] == metrics["rewards/exact_match/count/different"] == 1
    assert reward.score([]) == []


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({}, "rewards: needs at least one reward"),
        ({"exact": {}}, "rewards.exact.kind: 'exact' is not one of exact_match, numeric_match"),
        ({"length": {"max_len": 1, "weight": "much"}}, "rewards.length.weight: must be a finite number"),
        ({"length": {"max_len": 1, "weight": math.nan}}, "rewards.length.weight: must be a finite number"),
        ({"length": 3}, "rewards.length: expected the options of the reward, got 3"),
        ({"length": {}}, "rewards.length.max_len: is required"),
        ({"exact_match": {"feild": "a"}}, "rewards.exact_match.feild: unknown setting; did you mean 'field'"),
        ({"format": {"kind": "pattern", "pattern": "["}}, r"rewards.format.pattern: '\[' is not a regular"),
        ({"json": {"schema": "/nowhere.json"}}, "rewards.json.schema: /nowhere.json cannot be read"),
        ({"function": {"path": "x"}}, "rewards.function.path: 'x' does not have the form file.py:function"),
        ({"function": {"path": "x.py:f"}}, "rewards.function.path: the file 'x.py' does not exist"),
    ],
)
def test_settings_that_cannot_work(terms: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        build_reward(terms)


def test_a_kind_of_a_package_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelwright.reward.build.installed", lambda group, kind, taken: {})
    message = r"^ppo.rewards.mine.kind: 'code' is in a separate package: pip install 'modelwright\[sandbox\]'$"
    with pytest.raises(ConfigError, match=message):
        build_reward({"length": {"max_len": 1}, "mine": {"kind": "code"}}, path="ppo.rewards")


USER_REWARDS = """
from __future__ import annotations
import math
from dataclasses import dataclass

@dataclass
class Rule:
    value: float

def by_answer(sample):
    if sample.answer == "raise":
        raise KeyError("what")
    return {"nan": math.nan, "inf": math.inf, "text": "x", "none": None, "true": True}.get(sample.answer, 0.5)

def stops(sample):
    from modelwright.core.config import Stopped
    raise Stopped("stop")

number = 3
"""


def test_a_function_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_REWARDS)
    lines = list[str]()
    terms = {"mine": {"kind": "function", "path": f"{tmp_path}/mine.py:by_answer"}, "length": {"max_len": 9}}
    reward = build_reward(terms, log=lines.append)
    answers = ["raise", "nan", "inf", "text", "none", "true", "good"]
    result = reward.evaluate([sample(answer) for answer in answers])
    assert [score.outcome for score in result.scores[:5]] == [
        "mine/KeyError", "mine/not_finite", "mine/not_finite", "mine/ValueError", "mine/TypeError",
    ]  # fmt: skip
    assert [score.failed for score in result.scores] == [True] * 5 + [False] * 2
    assert [score.value for score in result.scores[5:]] == [2.0, 1.5]
    metrics = result.metrics()
    assert metrics["reward"] == 1.75
    assert metrics["reward/failures"] == metrics["rewards/mine/failures"] == 5
    assert metrics["rewards/mine/count/not_finite"] == 2
    assert metrics["rewards/mine/mean"] == 0.75
    assert metrics["rewards/length/failures"] == 0
    assert len(lines) == 5
    assert "reward mine: no score for a sample (KeyError): Traceback" in lines[0]
    assert 'mine.py", line 12, in by_answer' in lines[0]


def test_a_request_to_stop_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_REWARDS)
    reward = build_reward({"function": {"path": f"{tmp_path}/mine.py:stops"}})
    with pytest.raises(Stopped):
        reward.score([sample("x")])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (USER_REWARDS, r"does not define the function 'reward' \(it has: by_answer, stops\)"),
        ("import nothing_like_this", r"cannot be imported \(.*mine.py:1: ModuleNotFoundError: No module"),
        ("def reward(:", r"cannot be imported \(line 1: "),
        ("raise SystemExit(3)", r"cannot be imported \(.*mine.py:1: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_error(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"^rewards\.function\.path: .*{message}"):
        build_reward({"function": {"path": f"{tmp_path}/mine.py:reward"}})


@dataclass(frozen=True)
class Broken:
    """Raises for the whole call."""

    name: str = "broken"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        raise RuntimeError("out of order")


def test_a_reward_that_raises_fails_its_samples_and_no_other_term() -> None:
    lines = list[str]()
    vowels = VowelsConfig().build("vowels")
    reward = WeightedSum([Term(Broken(), 1.0), Term(vowels, 1.0)], log=lines.append)
    for _ in range(20):
        result = reward.evaluate([sample("a"), sample("b")])
    assert [score.outcome for score in result.scores] == ["broken/RuntimeError"] * 2
    assert [score.value for score in result.terms["vowels"]] == [1, 0]
    metrics = result.metrics()
    assert math.isnan(metrics["reward"])
    assert metrics["rewards/broken/failures"] == 2
    assert len(lines) == MAX_LOGGED
    assert "out of order" in lines[0]


def test_a_reward_with_the_wrong_number_of_scores_or_nan() -> None:
    one = WeightedSum([Term(VowelsConfig(values=(1.0, 2.0)).build("vowels"), 1.0)]).score([sample("a")])
    assert [(score.failed, score.outcome) for score in one] == [(True, "vowels/wrong_count")]
    two = WeightedSum([Term(VowelsConfig(values=(math.nan, 2.0)).build("vowels"), 1.0)]).score([sample("a")] * 2)
    assert [(score.failed, score.outcome) for score in two] == [(True, "vowels/not_finite"), (False, "")]


def test_a_term_of_weight_0_is_measured_and_fails_nothing() -> None:
    counted = build_reward({"vowels": {}}, kinds=KINDS).terms[0]
    broken = WeightedSum([counted, Term(Broken(), 0.0)])
    scored = broken.evaluate([sample("aa")])
    assert scored.scores == [Score(2.0)]
    assert [one.failed for one in scored.terms[Broken.name]] == [True]
    measured = WeightedSum([counted, Term(Vowels("more", VowelsConfig(vowels="x")), 0.0)]).evaluate([sample("axx")])
    assert (measured.scores[0].value, measured.terms["more"][0].value) == (1.0, 2.0)


def test_terms_that_all_have_weight_0_are_refused() -> None:
    with config_error("ppo.rewards"):
        build_reward({"vowels": {"weight": 0}}, kinds=KINDS, path="ppo.rewards")
