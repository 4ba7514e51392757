"""Documentation of settings, constants, and sections that inherit."""

from dataclasses import dataclass, field

import pytest

from modelwright.core.config import ConfigError, constant, difference, digest, dump, merge, parse
from modelwright.core.config_docs import annotated_yaml, defaults_of, settings_of
from modelwright.pipeline.run_config import run_schema


@dataclass(frozen=True, kw_only=True)
class Inner:
    """How it waits."""

    wait_s: float = 2.0
    """Seconds to wait; 0 for none."""
    retries: int = constant(3)
    """Attempts."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    """What it is called."""
    inner: Inner = field(default_factory=Inner)


def test_a_setting_has_its_documentation_default_type_and_unit() -> None:
    name, wait = settings_of(Outer)
    assert (name.key, name.default, name.allowed, name.doc) == ("name", "required", "text", "What it is called.")
    assert (wait.key, wait.default, wait.allowed, wait.unit) == ("inner.wait_s", "2.0", "number", "seconds")
    assert defaults_of(Outer) == {"inner": {"wait_s": 2.0}}


def test_yaml_carries_documentation() -> None:
    lines = list(annotated_yaml(Outer, dump(Outer(name="x"))))
    assert lines == [
        "# What it is called.",
        "name: x",
        "# How it waits.",
        "inner:",
        "  # Seconds to wait; 0 for none.",
        "  wait_s: 2.0",
    ]


def test_constants_are_for_python_alone() -> None:
    with pytest.raises(ConfigError, match=r"^retries: is fixed at 3"):
        parse(Inner, {"retries": 5})
    assert parse(Inner, {"retries": 3}) == Inner(), "the value that it has"
    assert parse(Inner, {"retries": 5}, constants=True) == Inner(retries=5)
    assert dump(Inner(retries=5)) == {"wait_s": 2.0}
    assert dump(Inner(retries=5), constants=True) == {"wait_s": 2.0, "retries": 5}
    assert digest(Inner(retries=5)) != digest(Inner())


def test_a_difference_merges_back() -> None:
    base = {"a": 1, "b": {"c": 2, "d": [1, 2]}}
    config = {"a": 1, "b": {"c": 3, "d": [1, 2]}}
    assert difference(config, base) == {"b": {"c": 3}}
    assert merge(base, difference(config, base)) == config


def test_every_setting_of_a_run_is_documented() -> None:
    assert [one.key for one in settings_of(run_schema()) if not one.doc] == []
