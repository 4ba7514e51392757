"""How much each assumption matters: the result at its lowest and at its highest value, all others as they are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from modelwright.core.config import dump, parse
from modelwright.core.errors import ConfigError
from modelwright.core.suggest import did_you_mean
from modelwright_plan.cost.bill import Bill, make_bill
from modelwright_plan.cost.prices import PriceTable
from modelwright_plan.cost.workload import Workload

ASSUMED = frozenset(
    {
        "hours",
        "interruptions_per_hour",
        "checkpoint_stall_s",
        "recovery_s",
        "tokens_per_month",
        "tokens_per_s",
        "utilization",
        "months",
        "size_bytes",
        "bytes_per_month",
    }
)
"""Fields of a workload that are estimates; the others are choices."""


@dataclass(frozen=True, kw_only=True)
class Swing:
    """One bar of the tornado: an assumption, its two values, and the results at them."""

    name: str
    low: float
    high: float
    at_low: float
    at_high: float

    @property
    def width(self) -> float:
        return abs(self.at_high - self.at_low)


def tornado(assumptions: Mapping[str, tuple[float, float]], evaluate: Callable[[str, float], float]) -> list[Swing]:
    """The swings, the widest first. assumptions: lowest and highest value by name; evaluate: the result if one of them
    has a certain value.
    """
    swings = [
        Swing(name=name, low=low, high=high, at_low=evaluate(name, low), at_high=evaluate(name, high))
        for name, (low, high) in assumptions.items()
    ]
    return sorted(swings, key=lambda swing: -swing.width)


def bill_tornado(bill: Bill, prices: PriceTable, *, vary: float) -> list[Swing]:
    """How the total of a bill depends on the workload's estimates and on each price.

    vary: how far each may be off, as a share of its value; `Workload.ranges` says otherwise for some. Raises
    `ConfigError` for a range of something that is no assumption.
    """
    plain: dict[str, Any] = dump(bill.workload)
    values = {path: _get(plain, path) for path in _paths(plain) if _get(plain, path)}
    costs = {f"price {price.key}": float(price.dollars) for price in bill.prices if price.dollars}
    ranges = {name: (value * (1 - vary), value * (1 + vary)) for name, value in {**values, **costs}.items()}
    ranges = {
        name: (low, min(high, 1.0) if name.endswith(".utilization") else high) for name, (low, high) in ranges.items()
    }
    for name, given in bill.workload.ranges.items():
        if name not in ranges:
            raise ConfigError(f"ranges: {name!r} is no assumption{did_you_mean(name, ranges)} of this workload")
        ranges[name] = given
    rows = {f"price {price.key}": price for price in bill.prices}

    def evaluate(name: str, value: float) -> float:
        if name in rows:
            row = replace(rows[name], usd=format(Decimal(repr(value)), "f"))
            return float(make_bill(bill.workload, prices.updated([row])).total)
        changed = _with(plain, name.split("."), value)
        return float(make_bill(parse(Workload, changed), prices).total)

    return tornado(ranges, evaluate)


def tornado_lines(swings: Sequence[Swing], base: float, *, top: int, width: int = 40) -> list[str]:
    """The tornado as text: bars around the present result."""
    shown = [swing for swing in swings if swing.width > 0][:top]
    reach = max((abs(value - base) for swing in shown for value in (swing.at_low, swing.at_high)), default=0.0)
    names = max((len(swing.name) for swing in shown), default=0)
    return [
        f"{swing.name:<{names}}  {_bar(swing, base, reach, width // 2)}  {min(swing.at_low, swing.at_high):>14,.2f} to "
        f"{max(swing.at_low, swing.at_high):,.2f}  (at {swing.low:.6g} and {swing.high:.6g})"
        for swing in shown
    ]


def _bar(swing: Swing, base: float, reach: float, half: int) -> str:
    below = round(half * max(0.0, base - min(swing.at_low, swing.at_high)) / reach)
    above = round(half * max(0.0, max(swing.at_low, swing.at_high) - base) / reach)
    return f"{'#' * below:>{half}}|{'#' * above:<{half}}"


def _paths(plain: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all estimates: `training.0.hours`."""
    items = plain.items() if isinstance(plain, Mapping) else enumerate(plain)
    for key, value in items:
        path = f"{prefix}{key}"
        if isinstance(value, (Mapping, list)):
            yield from _paths(value, f"{path}.")
        elif key in ASSUMED:
            yield path


def _get(plain: Any, path: str) -> float:
    for key in path.split("."):
        plain = plain[int(key) if isinstance(plain, list) else key]
    return plain


def _with(plain: Any, keys: Sequence[str], value: float) -> Any:
    """A copy with another value at one place; one that was a whole number stays one."""
    if not keys:
        return round(value) if isinstance(plain, int) else value
    key: Any = int(keys[0]) if isinstance(plain, list) else keys[0]
    changed = _with(plain[key], keys[1:], value)
    if isinstance(plain, list):
        return [changed if number == key else one for number, one in enumerate(plain)]
    return {**plain, key: changed}
