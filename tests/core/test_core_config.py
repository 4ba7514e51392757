"""Configs from mappings and back: errors name the path and the nearest setting."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from modelwright.core.artifacts import save_yaml
from modelwright.core.config import ConfigError, digest, dump, load_yaml, merge, parse, parse_scalar, set_dotted
from refusals import config_error


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 1.0
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, int] = (1, 2)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ConfigError(f"rate: must not be negative, got {self.rate}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    files: tuple[str, ...] = ()
    size: int | float = 1
    limit: int | None = None


def test_round_trip() -> None:
    config = Outer(name="x", inner=Inner(rate=0.5, kind="b"), files=("a",), limit=3)
    assert parse(Outer, dump(config)) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "x", "inner": {"rat": 1}}, r"inner\.rat: unknown setting; did you mean 'rate'"),
        ({}, "name: is required"),
        ({"name": "x", "inner": {"rate": -1}}, r"inner\.rate: must not be negative"),
        ({"name": "x", "inner": {"rate": "fast"}}, r"inner\.rate: expected float, got 'fast'"),
        ({"name": "x", "inner": {"rate": float("nan")}}, r"inner\.rate: must be a finite number, got nan"),
        ({"name": "x", "inner": {"rate": float("-inf")}}, r"inner\.rate: must be a finite number, got -inf"),
        ({"name": "x", "inner": {"rate": True}}, r"inner\.rate: expected float, got True"),
        ({"name": "x", "inner": {"kind": "c"}}, r"inner\.kind: 'c' is not one of a, b"),
        ({"name": "x", "inner": {"pair": [1]}}, r"inner\.pair: expected 2 values, got 1"),
        ({"name": "x", "inner": 3}, "inner: expected a mapping"),
        ({"name": "x", "limit": "no"}, "limit: expected int"),
    ],
)
def test_mistakes_name_their_path(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(Outer, data)


def test_a_choice_of_nothing_is_shown_as_such() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Choice:
        kind: Literal["", "a"] = ""

    with config_error("kind", "choice", match=r"^kind: 'c' is not one of '' \(nothing\), a$"):
        parse(Choice, {"kind": "c"})


def test_values_are_converted_where_nothing_is_lost() -> None:
    config = parse(Outer, {"name": 7, "inner": {"rate": 2, "pair": [1.0, 2]}, "files": "one"})
    assert config == Outer(name="7", inner=Inner(rate=2.0, pair=(1, 2)), files=("one",))


def test_yaml_reads_exponents_as_numbers_and_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("rate: 3e-4\nother: 1.5e3\nword: e3\n")
    assert load_yaml(path) == {"rate": 3e-4, "other": 1500.0, "word": "e3"}
    path.write_text("a: 1\nb: [1\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:\d+: is not valid YAML"):
        load_yaml(path)
    with pytest.raises(ConfigError, match="no such file"):
        load_yaml(tmp_path / "none.yaml")


def test_saved_yaml_can_be_parsed_again(tmp_path: Path) -> None:
    config = Outer(name="ä", inner=Inner(rate=3e-5))
    save_yaml(tmp_path / "c.yaml", config)
    assert parse(Outer, load_yaml(tmp_path / "c.yaml")) == config


def test_dotted_merge_and_digest() -> None:
    data: dict[str, object] = {}
    set_dotted(data, "a.b.c", 1)
    assert merge({"a": {"b": {"d": 2}}, "e": [1]}, data | {"e": [2]}) == {"a": {"b": {"d": 2, "c": 1}}, "e": [2]}
    with config_error("a.b.c"):
        set_dotted({"a": {"b": 1}}, "a.b.c", 2)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


@pytest.mark.parametrize(
    ("text", "value"), [("3e-4", 3e-4), ("true", True), ("[1, 2]", [1, 2]), ("a/b", "a/b"), ("-1", -1)]
)
def test_words(text: str, value: object) -> None:
    assert parse_scalar(text) == value
