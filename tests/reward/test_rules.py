"""Exact match, patterns, length and JSON."""

import json
from pathlib import Path

import pytest

from modelwright.core.config import ConfigError
from modelwright.reward.distinct_words import DistinctWordsConfig
from modelwright.reward.exact_match import ExactMatchConfig, normalize
from modelwright.reward.json_format import JsonConfig
from modelwright.reward.length import LengthConfig
from modelwright.reward.pattern import PatternConfig
from modelwright.reward.reward import RewardConfig, Sample, Score
from refusals import config_error
from reward_samples import sample


def score(config: RewardConfig, *samples: Sample) -> list[Score]:
    return config.build("reward").score(samples)


def values(config: RewardConfig, *samples: Sample) -> list[float]:
    scores = score(config, *samples)
    assert not [one for one in scores if one.failed]
    return [one.value for one in scores]


def test_squad_normalization() -> None:
    """Cases of `normalize_answer` of the official script for SQuAD, and the one where we differ."""
    assert normalize("The  Cat's, an\tapple!", "squad") == "cats apple"
    assert normalize("theater", "squad") == "theater"
    assert normalize("A", "squad") == "a"
    assert normalize("...", "squad") == "..."
    assert normalize(" The  cat ", "whitespace") == "The cat"


def test_exact_match() -> None:
    config = ExactMatchConfig()
    assert values(
        config, sample("the Denver Broncos.", answer="Denver Broncos"), sample("Denver", answer="Boston")
    ) == [1, 0]
    assert values(config, sample("b", answer=["a b", "B."]), sample("", answer="a"), sample("A", answer="A")) == [
        1,
        0,
        1,
    ]
    assert values(ExactMatchConfig(normalization="none"), sample("a ", answer="a")) == [0]
    marked = ExactMatchConfig(field="solution", marker="####", normalization="whitespace")
    long = "2 + 2 = 4\n#### 4"
    assert values(marked, sample("So\n#### 4 ", solution=long), sample("4", solution=long)) == [1, 0]
    (failed,) = score(config, sample("x", solution="x"))
    assert (failed.failed, failed.outcome) == (True, "no_reference")
    assert "'answer' (fields with values: solution)" in failed.detail


def test_pattern() -> None:
    config = PatternConfig(pattern=r"(?s)<think>.*?</think>\s*<answer>.*?</answer>")
    good = "<think>a\nb</think>\n<answer>c</answer>"
    assert values(config, sample(good), sample(good + "!"), sample("")) == [1, 0, 0]
    assert values(PatternConfig(pattern="b", match="search"), sample("abc"), sample("ac")) == [1, 0]
    assert values(PatternConfig(pattern=r"(?<!a)b(\d)\1"), sample("b11"), sample("b12")) == [1, 0]
    with config_error("pattern"):
        PatternConfig(pattern="(")


def test_a_pattern_that_backtracks_is_a_failure() -> None:
    fast, slow = score(PatternConfig(pattern="(a|a)*b(x+x+)+y"), sample("aabxxy"), sample("b" + "x" * 10_000))
    assert fast.value == 1
    assert (slow.failed, slow.outcome) == (True, "pattern_timeout")


def test_length() -> None:
    def lengths(config: LengthConfig, *counts: int) -> list[float]:
        return values(config, *(sample("x" * (2 * n), num_tokens=n) for n in counts))

    assert lengths(LengthConfig(min_len=2, max_len=4), 0, 1, 2, 4, 5) == [0, 0, 1, 1, 0]
    assert lengths(LengthConfig(min_len=2, max_len=4, unit="characters"), 0, 1, 2, 3) == [0, 1, 1, 0]
    linear = LengthConfig(min_len=4, max_len=8, shape="linear", margin=4)
    assert lengths(linear, 0, 1, 3, 4, 8, 9, 12, 100) == [0, 0.25, 0.75, 1, 1, 0.75, 0, 0]


def test_overlong_punishment_is_that_of_the_paper() -> None:
    """DAPO's own numbers: 16,384 expected tokens and 4,096 of cache (section 4.1)."""
    config = LengthConfig(max_len=20_480, shape="overlong", margin=4096)
    counts = [0, 16_384, 16_385, 18_432, 20_480, 20_481, 10**6]
    assert values(config, *(sample("", num_tokens=n) for n in counts)) == [0, 0, -1 / 4096, -0.5, -1, -1, -1]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"max_len": 3, "min_len": 4}, "min_len"), ({"max_len": 3, "margin": 1}, "margin"),
     ({"max_len": 3, "shape": "linear"}, "margin"), ({"max_len": 3, "shape": "overlong", "margin": 4}, "margin"),
     ({"max_len": 3, "min_len": 1, "shape": "overlong", "margin": 2}, "margin")],
)  # fmt: skip
def test_lengths_that_contradict_each_other(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        LengthConfig(**options)  # type: ignore[arg-type]


JSON = [
    ('{"a": 1}', 1), (' [1, 2]\n', 1), ("null", 1), ('```json\n{"a": 1}\n```', 1), ('Here:\n```\n[1]\n```\nDone', 1),
    ("", 0), ("{'a': 1}", 0), ('{"a": 1,}', 0), ('{"a": NaN}', 0), ("Infinity", 0), ("[" * 100_000, 0),
    ("1" * 10_000, 0), ('{"a": 1} and more', 0), ("```json\n1\n```\n```json\n2\n```", 0), ("\ud800", 0),
]  # fmt: skip


def test_json() -> None:
    scores = values(JsonConfig(), *(sample(text) for text, _ in JSON))
    assert [text[:20] for (text, right), value in zip(JSON, scores, strict=True) if value != right] == []


def test_json_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer", "minimum": 0}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    answers = [sample('{"age": 3}'), sample('{"age": -3}'), sample("{}"), sample("3"), sample("no")]
    assert values(JsonConfig(schema=str(tmp_path / "schema.json")), *answers) == [1, 0, 0, 0, 0]
    own = JsonConfig(schema_field="schema")
    assert values(own, sample("3", schema={"type": "integer"}), sample("3", schema='{"type": "string"}')) == [1, 0]


@pytest.mark.parametrize(
    ("schema", "answer", "reason"),
    [(None, "3", "bad_schema"), ("{", "3", "bad_schema"), ({"type": "wrong"}, "3", "bad_schema"),
     ({"$ref": "http://localhost:1/schema.json"}, "3", "bad_schema"), ({"$ref": "#/nothing"}, "3", "bad_schema"),
     ({"pattern": "(x+x+)+y"}, json.dumps("x" * 10_000), "pattern_timeout"), ({"pattern": "("}, '"a"', "bad_schema")],
)  # fmt: skip
def test_a_bad_schema_is_a_failure(schema: object, answer: str, reason: str) -> None:
    (result,) = score(JsonConfig(schema_field="schema"), sample(answer, schema=schema))
    assert (result.failed, result.outcome) == (True, reason), result


def test_a_schema_file_that_cannot_be_used(tmp_path: Path) -> None:
    with config_error("schema", match=r"schema: .*missing.json cannot be read"):
        JsonConfig(schema=str(tmp_path / "missing.json")).build("json")
    with config_error("schema_field"):
        JsonConfig(schema="a", schema_field="b")


def test_distinct_words() -> None:
    assert values(DistinctWordsConfig(max_words=3), sample("One two, one."), sample("")) == [2 / 3, 0]
    with config_error("max_words"):
        DistinctWordsConfig(max_words=0)
