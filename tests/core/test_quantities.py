"""Numbers with prefixes and units, in configuration fields and wherever a size is read."""

from dataclasses import dataclass
from fractions import Fraction

import pytest

from modelwright.core.config import ConfigError, parse, parse_count, parse_quantity


@dataclass(frozen=True, kw_only=True)
class Sizes:
    num_tokens: int = 0
    shard_bytes: int = 0
    name: str = ""


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("2M", 2_000_000, ""),
        ("1.1K", 1100, ""),
        ("2Mi", 2**21, ""),
        ("64ki", 2**16, ""),
        ("180MiB", 180 * 2**20, "b"),
        ("80 GB", 80 * 10**9, "b"),
        ("0.5g", 5 * 10**8, ""),
        ("9e14", 9 * 10**14, ""),
        ("3T", 3 * 10**12, ""),
        ("1.5TFLOP/s", 15 * 10**11, "flop/s"),
        ("100MB/s", 10**8, "b/s"),
        ("0.3", Fraction(3, 10), ""),
    ],
)
def test_prefixes_are_exact(text: str, value: int | Fraction, unit: str) -> None:
    quantity = parse_quantity(text)
    assert quantity is not None
    assert (quantity.value, quantity.unit) == (value, unit)


@pytest.mark.parametrize("text", ["", "M", "-2M", "2X", "2 M M", "0x10", "1e9999", "nan", "2Kb/m"])
def test_what_is_no_number(text: str) -> None:
    assert parse_quantity(text) is None


def test_counts() -> None:
    assert [parse_count(text) for text in ("4096", "65_536", "4Ki", "2M")] == [4096, 65_536, 4096, 2_000_000]
    assert [parse_count(text) for text in ("2MB", "1.5", "-1", "x")] == [None] * 4


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [("num_tokens", "2M", 2_000_000), ("num_tokens", "1.5K", 1500), ("shard_bytes", "180MiB", 180 * 2**20),
     ("shard_bytes", "64Mi", 2**26)],
)  # fmt: skip
def test_whole_numbers_take_prefixes(field: str, text: str, value: int) -> None:
    assert getattr(parse(Sizes, {field: text}), field) == value
    assert parse(Sizes, {"name": text}).name == text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_tokens", "2MB", "num_tokens: '2MB' has a unit that this field does not take; write 2000000, 2M or 2Mi"),
        ("shard_bytes", "2MB/s", "shard_bytes: '2MB/s' has a unit"),
        ("num_tokens", "1.2345K", "num_tokens: '1.2345K' is not a whole number"),
        ("num_tokens", "12", "num_tokens: expected int, got '12'"),
        ("num_tokens", "two", "num_tokens: expected int, got 'two'"),
        ("num_tokens", "-2M", "num_tokens: expected int, got '-2M'"),
    ],
)
def test_mistakes_in_whole_numbers(field: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Sizes, {field: value})
    assert str(caught.value).startswith(message)
