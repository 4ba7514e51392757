"""The bill of a workload, line by line, its sensitivity to each assumption, and both as text and as plain data.

Quantities and prices are exact fractions; a line is rounded to the cent, half a cent up, and the total is the sum of
the lines. Every line has one price, so that another price changes only its own lines.
"""

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from modelwright.core.config import ConfigError, did_you_mean, dump, parse
from modelwright_plan.cost.prices import UNITS, Kind, Price, PriceTable, age_warnings
from modelwright_plan.cost.workload import StorageUse, TrainingUse, Workload
from modelwright_plan.intervals import CheckpointCosts, daly_interval_s, expected_wall_s

HOUR_S = 3600
MONTH_HOURS = 730
"""Hours of a month in bills of cloud providers: a twelfth of 365 days."""
MONTH_DAYS = Fraction(365, 12)
GIB = 2**30
TERM_HOURS = {"reserved_1y": 8760, "reserved_3y": 26_280}


@dataclass(frozen=True, kw_only=True)
class BillLine:
    """A line of the bill: a quantity at one price."""

    use: str
    """Name of the training, service, storage or traffic."""
    what: str
    quantity: Fraction
    """Amount in the unit of the price (`prices.UNITS`)."""
    price: Price

    @property
    def amount(self) -> Decimal:
        """US dollars, rounded to the cent, half a cent up."""
        dollars = self.quantity * Fraction(self.price.dollars)
        return Decimal(math.floor(dollars * 100 + Fraction(1, 2))).scaleb(-2)


@dataclass(frozen=True, kw_only=True)
class Bill:
    """All lines of a workload."""

    workload: Workload
    lines: Sequence[BillLine]

    @property
    def total(self) -> Decimal:
        return sum((line.amount for line in self.lines), Decimal(0))

    @property
    def prices(self) -> list[Price]:
        """Rows of the price table that the bill uses, each once."""
        return list({line.price.key: line.price for line in self.lines}.values())


def make_bill(workload: Workload, prices: PriceTable) -> Bill:
    """Prices the workload. Raises `ConfigError` if a price is missing, and for a training that would never end because
    of interruptions.
    """
    place, lines = (workload.provider, workload.region), list[BillLine]()
    for use in workload.training:
        price = prices.price("compute", *place, use.instance, use.purchase)
        hours, work = exact(use.hours), ""
        if use.interruptions_per_hour:
            hours, work = Fraction(math.ceil(training_wall_s(use)), HOUR_S), f" for {_decimal(hours)} h of work"
        what = f"{use.count} x {use.instance} {use.purchase}, {_decimal(hours)} h{work}"
        lines.append(BillLine(use=use.name, what=what, quantity=use.count * _billed_hours(hours, price), price=price))
    for use in workload.serving:
        price = prices.price("compute", *place, use.instance, use.purchase)
        capacity = exact(use.tokens_per_s) * exact(use.utilization) * MONTH_HOURS * HOUR_S
        count = max(use.min_instances, math.ceil(exact(use.tokens_per_month) / capacity))
        hours = exact(use.months) * MONTH_HOURS
        what = f"{count} x {use.instance} {use.purchase}, {_decimal(hours)} h"
        lines.append(BillLine(use=use.name, what=what, quantity=count * _billed_hours(hours, price), price=price))
    for use in workload.storage:
        lines += _storage_lines(use, place, prices)
    for use in workload.network:
        tiers, gib = prices.tiers("network", *place, use.path), Fraction(use.bytes_per_month, GIB)
        # One line for each tier that the traffic of a month reaches.
        for number, tier in enumerate(tiers):
            above = tiers[number + 1].from_gib if number + 1 < len(tiers) else gib
            within = min(gib, Fraction(above)) - tier.from_gib
            if within > 0:
                what = f"{use.path}, {_decimal(within)} GiB a month for {_decimal(exact(use.months))} months"
                lines.append(BillLine(use=use.name, what=what, quantity=within * exact(use.months), price=tier))
    return Bill(workload=workload, lines=lines)


def exact(number: float) -> Fraction:
    """Returns the decimal number that a user wrote: 0.1 is a tenth, not the nearest binary fraction."""
    return Fraction(repr(number))


def training_wall_s(use: TrainingUse) -> float:
    """Computes the expected seconds of the job, with checkpoints and interruptions on spot instances."""
    work_s = use.hours * HOUR_S
    if not use.interruptions_per_hour:
        return work_s
    costs = CheckpointCosts(stall_s=use.checkpoint_stall_s, recovery_s=use.recovery_s)
    mtbf_s = HOUR_S / use.interruptions_per_hour
    interval_s = use.checkpoint_every_s or daly_interval_s(costs.stall_s, mtbf_s)
    wall_s = expected_wall_s(work_s, min(interval_s, work_s), costs, mtbf_s)
    if math.isinf(wall_s):
        raise ConfigError(f"training: {use.name} never ends at {use.interruptions_per_hour} interruptions an hour")
    return wall_s


def _billed_hours(hours: Fraction, price: Price) -> Fraction:
    """Rounds up to whole seconds, or to whole terms of a reservation."""
    if term := TERM_HOURS.get(price.purchase, 0):
        return Fraction(math.ceil(hours / term) * term)
    return Fraction(math.ceil(hours * HOUR_S), HOUR_S)


def _storage_lines(use: StorageUse, place: tuple[str, str], prices: PriceTable) -> Iterator[BillLine]:
    gib = Fraction(use.size_bytes, GIB)
    end = exact(use.months) * MONTH_DAYS
    moves = [move for move in use.lifecycle if move.after_days < end]
    classes = [use.storage_class, *(move.storage_class for move in moves)]
    edges = [Fraction(0), *(Fraction(move.after_days) for move in moves), end]
    for storage_class, first, last in zip(classes, edges, edges[1:], strict=False):
        price = prices.price("storage", *place, storage_class)
        days = max(last - first, Fraction(price.minimum_days))
        what = f"{storage_class}, {_decimal(gib)} GiB for {_decimal(days)} days"
        yield BillLine(use=use.name, what=what, quantity=gib * days / MONTH_DAYS, price=price)
    for read in use.retrievals:
        quantity = Fraction(read.size_bytes, GIB)
        price = prices.price("retrieval", *place, read.storage_class)
        yield BillLine(use=use.name, what=f"read from {read.storage_class}", quantity=quantity, price=price)


def _decimal(value: Fraction) -> str:
    """Formats a number with at most two decimals and grouped thousands."""
    text = f"{float(value):,.2f}"
    return text.rstrip("0").rstrip(".")


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
"""Fields of a workload that are estimates; all other fields are choices."""


@dataclass(frozen=True, kw_only=True)
class Swing:
    """A bar of the tornado: an assumption, its two values, and the results at them."""

    name: str
    low: float
    high: float
    at_low: float
    at_high: float

    @property
    def width(self) -> float:
        return abs(self.at_high - self.at_low)


def tornado(assumptions: Mapping[str, tuple[float, float]], evaluate: Callable[[str, float], float]) -> list[Swing]:
    """Varies one assumption at a time; returns the swings, the widest first. assumptions: lowest and highest value by
    name; evaluate: computes the result if one of them has a given value.
    """
    swings = [
        Swing(name=name, low=low, high=high, at_low=evaluate(name, low), at_high=evaluate(name, high))
        for name, (low, high) in assumptions.items()
    ]
    return sorted(swings, key=lambda swing: -swing.width)


def bill_tornado(bill: Bill, prices: PriceTable, *, vary: float) -> list[Swing]:
    """Computes the swings of a bill's total over the workload's estimates and each price.

    vary: largest relative error of each assumption; `Workload.ranges` overrides it. Raises `ConfigError` for a range
    whose name is not an assumption.
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
            raise ConfigError(f"ranges: {name!r} is not an assumption{did_you_mean(name, ranges)} of this workload")
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
    """Formats the tornado as text: bars around the present result."""
    shown, half = [swing for swing in swings if swing.width > 0][:top], width // 2
    reach = max((abs(value - base) for swing in shown for value in (swing.at_low, swing.at_high)), default=0.0)
    names = max((len(swing.name) for swing in shown), default=0)
    lines = []
    for swing in shown:
        least, most = min(swing.at_low, swing.at_high), max(swing.at_low, swing.at_high)
        below, above = (round(half * max(0.0, part) / reach) for part in (base - least, most - base))
        lines.append(
            f"{swing.name:<{names}}  {'#' * below:>{half}}|{'#' * above:<{half}}  {least:>14,.2f} to {most:,.2f}  "
            f"(at {swing.low:.6g} and {swing.high:.6g})"
        )
    return lines


def _paths(plain: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted paths of all estimates: `training.0.hours`."""
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
    """Returns a copy with another value at one place, rounded if the old value was an integer."""
    if not keys:
        return round(value) if isinstance(plain, int) else value
    key: Any = int(keys[0]) if isinstance(plain, list) else keys[0]
    changed = _with(plain[key], keys[1:], value)
    if isinstance(plain, list):
        return [changed if number == key else one for number, one in enumerate(plain)]
    return {**plain, key: changed}


TITLES: dict[Kind, str] = {
    "compute": "compute",
    "storage": "storage",
    "retrieval": "reading from storage",
    "network": "network",
}
UNIT_NAMES: dict[Kind, str] = {
    "compute": "hour",
    "storage": "GiB and month",
    "retrieval": "GiB",
    "network": "GiB",
}
NOT_INCLUDED = "Not included: requests, operations, support, taxes, discounts."


def bill_text(bill: Bill, swings: Sequence[Swing], *, today: datetime.date, top: int, notes: Sequence[str] = ()) -> str:
    """Formats the lines by kind with their prices, the total, the tornado, and the prices' origins and age."""
    width = max(len(f"{line.use}: {line.what}") for line in bill.lines)
    lines = [f"{bill.workload.name}: {bill.workload.provider} {bill.workload.region}, US dollars"]
    for kind, title in TITLES.items():
        rows = [line for line in bill.lines if line.price.kind == kind]
        if rows:
            subtotal = sum((row.amount for row in rows), Decimal(0))
            lines += ["", f"{title:<{width + 34}}{subtotal:>14,.2f}"]
        for row in rows:
            words = f"{row.use}: {row.what}"
            quantity = f"{float(row.quantity):,.2f} {UNITS[kind]}"
            lines.append(f"  {words:<{width}}{quantity:>20} x {row.price.usd:<9}{row.amount:>14,.2f}")
    lines += ["", f"{'total':<{width + 34}}{bill.total:>14,.2f}", NOT_INCLUDED]
    if swings:
        lines += ["", "What the total depends on most:", *tornado_lines(swings, float(bill.total), top=top)]
    lines += ["", "Prices:"]
    for price in bill.prices:
        note = f" ({price.note})" if price.note else ""
        origin = f"as of {price.date}, {price.source}" if price.checked else f"believed for {price.date}, not checked"
        lines.append(f"  {price.key}: {price.usd} per {UNIT_NAMES[price.kind]}, {origin}{note}")
    warnings = [f"warning: {text}" for text in price_warnings(bill.prices, today=today)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes), *warnings])


def bill_data(bill: Bill, swings: Sequence[Swing], *, today: datetime.date) -> dict[str, Any]:
    """Returns the bill as plain data; amounts and prices are decimal numbers as text."""
    return {
        "name": bill.workload.name,
        "lines": [
            {
                "kind": line.price.kind,
                "use": line.use,
                "what": line.what,
                "quantity": float(line.quantity),
                "unit": UNITS[line.price.kind],
                "price": line.price.key,
                "usd_per_unit": line.price.usd,
                "usd": str(line.amount),
            }
            for line in bill.lines
        ],
        "usd": str(bill.total),
        "sensitivity": [vars(swing) for swing in swings],
        "warnings": price_warnings(bill.prices, today=today),
    }


def price_warnings(prices: Sequence[Price], *, today: datetime.date) -> list[str]:
    """Returns warnings about prices that nobody has checked and about old ones."""
    unchecked = sum(not price.checked for price in prices)
    text = (
        f"{unchecked} of {len(prices)} prices were not compared with the provider's page; give your own with --prices"
    )
    return [*([text] if unchecked else []), *age_warnings(prices, today=today)]
