"""Pairwise testing: few runs that together contain every pair of options (Cohen et al. 1997, "The AETG System")."""

import itertools
from collections.abc import Callable, Iterable, Sequence

Pair = frozenset[str]
"""Two options; a set of one option stands for the option itself."""


def pairs_of(options: Iterable[str]) -> set[Pair]:
    """All pairs of different options."""
    return {frozenset(pair) for pair in itertools.combinations(options, 2)}


def covering_array(
    options: Sequence[str], required: Iterable[Pair], can_combine: Callable[[Sequence[str]], bool]
) -> list[list[str]]:
    """Rows of options that together contain every required pair and every option.

    options: in the order that decides between equally good choices.
    required: pairs to cover; each of them can be combined.
    can_combine: whether a set of options goes together; asked for pairs and for whole rows, which may be refused
        although each of their pairs goes together.

    The greedy choice of AETG: a row begins with a pair, or an option, that is not covered yet and takes the option that
    covers most of what is left, until none covers anything.
    """
    fits = {pair for pair in pairs_of(options) if can_combine(sorted(pair, key=options.index))}
    left, rows = set(required), []
    assert left <= fits, f"required pairs that do not go together: {left - fits}"
    left |= {frozenset([option]) for option in options}
    while left:
        first = min(left, key=lambda covered: (-len(covered), sorted(map(options.index, covered))))
        row = sorted(first, key=options.index)
        candidates = [option for option in options if option not in row]
        while candidates := [one for one in candidates if all(frozenset((one, other)) in fits for other in row)]:
            gains = {one: len(left & _covered_with(one, row)) for one in candidates}
            best = max(candidates, key=gains.__getitem__)
            if not gains[best]:
                break
            candidates.remove(best)
            if can_combine([*row, best]):
                row.append(best)
        left -= pairs_of(row) | {frozenset([option]) for option in row}
        rows.append(row)
    return rows


def _covered_with(option: str, row: Sequence[str]) -> set[Pair]:
    """What a row covers in addition when it takes the option."""
    return {frozenset((option, other)) for other in row} | {frozenset([option])}
