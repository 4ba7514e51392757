"""Words on the command line become the right values, or an error that names the nearest setting."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from modelwright.core.config import ConfigError, all_paths, constant, parse, read_overrides, split_words
from refusals import config_error


@dataclass(frozen=True, kw_only=True)
class Data:
    sources: tuple[str, ...] = ("python",)
    text_field: str = "text"
    retries: int = constant(3)


@dataclass(frozen=True, kw_only=True)
class Optim:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    compile: bool = False
    compute: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = "run"
    data: Data = field(default_factory=Data)
    pretrain: Optim = field(default_factory=Optim)


def read(line: str) -> dict[str, object]:
    leading, options = split_words(line.split())
    assert leading == ["tiny"]
    return read_overrides(Run, options)


def test_values_of_every_kind() -> None:
    line = "tiny --data.sources a b c --pretrain.learning_rate=3e-4 --pretrain.betas 0.9 0.99 --pretrain.compile"
    assert read(line) == {
        "data": {"sources": ["a", "b", "c"]},
        "pretrain": {"learning_rate": 3e-4, "betas": [0.9, 0.99], "compile": True},
    }


def test_text_stays_text() -> None:
    assert read("tiny --name 1e3 --data.text-field no --data.sources 007") == {
        "name": "1e3",
        "data": {"text_field": "no", "sources": ["007"]},
    }


def test_a_list_may_be_written_as_yaml() -> None:
    assert read("tiny --pretrain.betas=[0.8,0.9]") == {"pretrain": {"betas": [0.8, 0.9]}}


def test_negative_numbers_and_equals_signs_are_values() -> None:
    assert read("tiny --pretrain.learning_rate -1 --name=a=b") == {"pretrain": {"learning_rate": -1}, "name": "a=b"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tiny --pretrain.learing_rate 1", "did you mean --pretrain.learning_rate"),
        ("tiny --learning_rate 1", "did you mean --pretrain.learning_rate"),
        ("tiny --pretrian.compile", "did you mean --pretrain.compile"),
        ("tiny --dry-rum", "unknown setting"),
        ("tiny --pretrain.learning_rate.x 1", "did you mean --pretrain.learning_rate"),
        ("tiny --name", "needs a value"),
        ("tiny --data.sources", "needs a value"),
        ("tiny --name a b", "'b' is one too many"),
    ],
)
def test_mistakes(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(line)


def test_all_paths_names_groups_and_fields() -> None:
    assert list(all_paths(Run))[:4] == ["name", "data", "data.sources", "data.text_field"]


def test_a_setting_that_is_fixed_is_named_as_such_and_accepted_with_its_own_value() -> None:
    assert parse(Run, read("tiny --data.retries 3")) == Run()
    with pytest.raises(ConfigError, match=r"data\.retries: is fixed at 3") as caught:
        parse(Run, read("tiny --data.retries 4"))
    assert caught.value.code == "fixed"
    with pytest.raises(ConfigError) as caught:
        read("tiny --data.tries 4")
    assert "retries" not in str(caught.value).split("known there")[1]


def test_an_empty_mapping_is_refused_because_it_would_change_nothing() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Limits:
        limits: dict[str, float] = field(default_factory=lambda: {"words": 9.0})

    assert read_overrides(Limits, [("limits", ["{words:", "5.0}"])]) == {"limits": {"words": 5.0}}
    with config_error("limits"):
        read_overrides(Limits, [("limits", ["{}"])])
