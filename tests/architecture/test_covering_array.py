"""The covering array has every pair that can be covered, in far fewer runs than there are pairs."""

from collections.abc import Sequence

import pytest

from covering_array import covering_array, pairs_of

OPTIONS = [f"{factor}{level}" for factor in "abcdef" for level in range(3)]


def one_level_of_each_factor(options: Sequence[str]) -> bool:
    factors = [option[0] for option in options]
    return len(set(factors)) == len(factors)


def test_every_pair_is_in_a_row() -> None:
    required = {pair for pair in pairs_of(OPTIONS) if one_level_of_each_factor(sorted(pair))}
    rows = covering_array(OPTIONS, required, one_level_of_each_factor)
    assert required <= set().union(*map(pairs_of, rows))
    assert all(map(one_level_of_each_factor, rows))
    assert 9 <= len(rows) <= 20 < len(required)


def test_a_row_that_is_refused_as_a_whole_is_not_built() -> None:
    rows = covering_array(OPTIONS, pairs_of(OPTIONS), lambda options: len(options) <= 3)
    assert pairs_of(OPTIONS) <= set().union(*map(pairs_of, rows))
    assert max(map(len, rows)) == 3


def test_options_without_a_required_pair_are_in_a_row() -> None:
    assert covering_array(["a", "b", "c"], [frozenset("ab")], lambda options: True) == [["a", "b", "c"]]
    assert covering_array(["a", "b", "c"], [frozenset("ab")], lambda options: "c" not in options[1:]) == [
        ["a", "b"],
        ["c"],
    ]


def test_a_required_pair_that_does_not_go_together_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="do not go together"):
        covering_array(["a", "b"], [frozenset("ab")], lambda options: len(options) < 2)
