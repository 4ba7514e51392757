"""The bill of a workload, line by line.

Quantities and prices are exact fractions; a line is rounded to the cent, half a cent up, and the total is the sum of
the lines. Every line has one price, so that another price changes its own lines and no others.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from modelwright.core.errors import ConfigError
from modelwright_plan.cost.prices import UNITS, Kind, Price, PriceTable
from modelwright_plan.cost.workload import NetworkUse, ServingUse, StorageUse, TrainingUse, Workload
from modelwright_plan.spot.intervals import CheckpointCosts, daly_interval_s, expected_wall_s

HOUR_S = 3600
MONTH_HOURS = 730
"""Hours of a month in bills of cloud providers: a twelfth of 365 days."""
MONTH_DAYS = Fraction(365, 12)
GIB = 2**30
TERM_HOURS = {"reserved_1y": 8760, "reserved_3y": 26_280}


@dataclass(frozen=True, kw_only=True)
class BillLine:
    """One line: so many units at one price."""

    use: str
    """The name of the training, service, storage or traffic."""
    what: str
    quantity: Fraction
    """In the unit of the price (`prices.UNITS`)."""
    price: Price

    @property
    def amount(self) -> Decimal:
        """US dollars, rounded to the cent."""
        return to_cents(self.quantity * Fraction(self.price.dollars))

    @property
    def unit(self) -> str:
        return UNITS[self.price.kind]


@dataclass(frozen=True, kw_only=True)
class Bill:
    """All lines of a workload."""

    workload: Workload
    lines: Sequence[BillLine]

    @property
    def total(self) -> Decimal:
        return sum((line.amount for line in self.lines), Decimal(0))

    def of_kind(self, kind: Kind) -> Decimal:
        return sum((line.amount for line in self.lines if line.price.kind == kind), Decimal(0))

    @property
    def prices(self) -> list[Price]:
        """The rows that the bill is made of, each once."""
        return list({line.price.key: line.price for line in self.lines}.values())


def to_cents(dollars: Fraction) -> Decimal:
    """Rounded to the cent, half a cent up."""
    return Decimal(math.floor(dollars * 100 + Fraction(1, 2))).scaleb(-2)


def make_bill(workload: Workload, prices: PriceTable) -> Bill:
    """Raises `ConfigError` for something that has no price, and for training that interruptions let never end."""
    return Bill(workload=workload, lines=list(_lines(workload, prices)))


def _lines(workload: Workload, prices: PriceTable) -> Iterator[BillLine]:
    for training in workload.training:
        yield _training_line(training, workload, prices)
    for serving in workload.serving:
        yield _serving_line(serving, workload, prices)
    for storage in workload.storage:
        yield from _storage_lines(storage, workload, prices)
    for network in workload.network:
        yield from _network_lines(network, workload, prices)


def exact(number: float) -> Fraction:
    """The decimal number that a user wrote: 0.1 is a tenth, not the nearest binary fraction."""
    return Fraction(repr(number))


def training_wall_s(use: TrainingUse) -> float:
    """Expected seconds of the job, with checkpoints and interruptions on spot instances."""
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


def _training_line(use: TrainingUse, workload: Workload, prices: PriceTable) -> BillLine:
    price = prices.price("compute", workload.provider, workload.region, use.instance, use.purchase)
    hours = exact(use.hours)
    if use.interruptions_per_hour:
        hours = Fraction(math.ceil(training_wall_s(use)), HOUR_S)
    what = f"{use.count} x {use.instance} {use.purchase}, {_decimal(hours)} h"
    if use.interruptions_per_hour:
        what += f" for {_decimal(exact(use.hours))} h of work"
    return BillLine(use=use.name, what=what, quantity=use.count * _billed_hours(hours, price), price=price)


def _serving_line(use: ServingUse, workload: Workload, prices: PriceTable) -> BillLine:
    price = prices.price("compute", workload.provider, workload.region, use.instance, use.purchase)
    capacity = exact(use.tokens_per_s) * exact(use.utilization) * MONTH_HOURS * HOUR_S
    count = max(use.min_instances, math.ceil(exact(use.tokens_per_month) / capacity))
    hours = exact(use.months) * MONTH_HOURS
    what = f"{count} x {use.instance} {use.purchase}, {_decimal(hours)} h"
    return BillLine(use=use.name, what=what, quantity=count * _billed_hours(hours, price), price=price)


def _billed_hours(hours: Fraction, price: Price) -> Fraction:
    """Whole seconds, or whole terms of a reservation."""
    if term := TERM_HOURS.get(price.purchase, 0):
        return Fraction(math.ceil(hours / term) * term)
    return Fraction(math.ceil(hours * HOUR_S), HOUR_S)


def _storage_lines(use: StorageUse, workload: Workload, prices: PriceTable) -> Iterator[BillLine]:
    place, gib = (workload.provider, workload.region), Fraction(use.size_bytes, GIB)
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


def _network_lines(use: NetworkUse, workload: Workload, prices: PriceTable) -> Iterator[BillLine]:
    """One line for each tier that the traffic of a month reaches."""
    tiers = prices.tiers("network", workload.provider, workload.region, use.path)
    gib = Fraction(use.bytes_per_month, GIB)
    for number, tier in enumerate(tiers):
        above = tiers[number + 1].from_gib if number + 1 < len(tiers) else gib
        within = min(gib, Fraction(above)) - tier.from_gib
        if within > 0:
            what = f"{use.path}, {_decimal(within)} GiB a month for {_decimal(exact(use.months))} months"
            yield BillLine(use=use.name, what=what, quantity=within * exact(use.months), price=tier)


def _decimal(value: Fraction) -> str:
    """At most two decimals, thousands grouped."""
    text = f"{float(value):,.2f}"
    return text.rstrip("0").rstrip(".")
