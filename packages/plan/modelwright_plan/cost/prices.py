"""The table of prices: dated rows that ship with the package, and a user's rows that replace them."""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Literal

from modelwright.core.config import ConfigError, did_you_mean, load_yaml, parse

Kind = Literal["compute", "storage", "retrieval", "network"]
Purchase = Literal["on_demand", "spot", "reserved_1y", "reserved_3y"]
UNITS: dict[Kind, str] = {"compute": "h", "storage": "GiB-month", "retrieval": "GiB", "network": "GiB"}
OLD_AFTER_DAYS = 180
"""Providers change list prices about once or twice a year, and spot prices daily."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """A row of the table: the price of one unit at a provider in a region on a date."""

    kind: Kind
    provider: str
    region: str
    name: str
    """Instance type, storage class (`hot`, `warm`, `cold`) or network path (`internet`, `cross_zone`,
    `cross_region`)."""
    usd: str
    """US dollars per unit (`UNITS`), as a decimal number."""
    date: str
    """Date on which the price was valid, as YYYY-MM-DD."""
    source: str
    """Publication of the price."""
    checked: bool = False
    """True once somebody has compared the row with its source; rows that ship with the package are not checked."""
    purchase: Purchase = "on_demand"
    """Purchase option of compute."""
    from_gib: int = 0
    """Monthly traffic in GiB from which this row applies."""
    minimum_days: int = 0
    """Least number of days for which an object in this storage class is billed."""
    note: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+(\.\d+)?(e-\d+)?", self.usd):
            raise ConfigError(f"usd: {self.usd!r} is not a price; write dollars such as 0.023")
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise ConfigError(f"date: {self.date!r} is not a date; write YYYY-MM-DD, in quotes") from None
        for name in ("from_gib", "minimum_days"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")

    @property
    def key(self) -> str:
        """Key of the row; a user's row replaces the row with the same key."""
        words = [self.provider, self.region, self.kind, self.name]
        words += [self.purchase] if self.kind == "compute" else []
        words += [f"from {self.from_gib} GiB"] if self.from_gib else []
        return "/".join(words)

    @property
    def dollars(self) -> Decimal:
        return Decimal(self.usd)

    def age_days(self, today: datetime.date) -> int:
        return (today - datetime.date.fromisoformat(self.date)).days


@dataclass(frozen=True, kw_only=True)
class _PriceFile:
    rows: tuple[Price, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class PriceTable:
    """Rows by key."""

    rows: dict[str, Price]

    def updated(self, rows: Iterable[Price]) -> "PriceTable":
        """Returns the table with these rows in place of those with equal keys."""
        return PriceTable({**self.rows, **{row.key: row for row in rows}})

    def tiers(
        self, kind: Kind, provider: str, region: str, name: str, purchase: Purchase = "on_demand"
    ) -> Sequence[Price]:
        """Returns the rows of one price, by the amount from which they apply. Raises `ConfigError` if none exists, or
        none that applies from 0 on.
        """
        wanted = (kind, provider, region, name, purchase)
        found = [
            row for row in self.rows.values() if (row.kind, row.provider, row.region, row.name, row.purchase) == wanted
        ]
        if not found:
            places = sorted({f"{row.provider}/{row.region}" for row in self.rows.values()})
            place = f"{provider}/{region}"
            of_kind = [row for row in self.rows.values() if row.kind == kind]
            names = sorted({row.name for row in of_kind if f"{row.provider}/{row.region}" == place})
            if place not in places:
                problem = f"no prices for {place}{did_you_mean(place, places)}"
                known = f"known: {', '.join(places)}"
            elif name not in names:
                problem = f"no price of {kind} {name!r}{did_you_mean(name, names)}"
                known = f"known in {place}: {', '.join(names) or 'none'}"
            else:
                bought = sorted({row.purchase for row in of_kind if row.name == name})
                problem, known = f"no price of {name} as {purchase}", f"known: {', '.join(bought)}"
            raise ConfigError(f"prices: {problem}; {known}; add a row with --prices FILE")
        found.sort(key=lambda row: row.from_gib)
        if found[0].from_gib:
            raise ConfigError(f"{found[0].key}: the price of the first {found[0].from_gib} GiB is missing; add a row")
        return found

    def price(self, kind: Kind, provider: str, region: str, name: str, purchase: Purchase = "on_demand") -> Price:
        """Returns the row of a price without tiers."""
        return self.tiers(kind, provider, region, name, purchase)[0]


def shipped_prices() -> PriceTable:
    """Reads the table that ships with the package."""
    return PriceTable({}).updated(_rows(Path(str(files("modelwright_plan.cost") / "prices.yaml"))))


def load_prices(path: Path | None) -> PriceTable:
    """Returns the package's table, with the rows of a user's file in place of those with equal keys. Raises
    `ConfigError` that names the file and the row.
    """
    table = shipped_prices()
    return table.updated(_rows(path)) if path else table


def age_warnings(rows: Iterable[Price], *, today: datetime.date) -> list[str]:
    """Returns a line for each date more than `OLD_AFTER_DAYS` ago or in the future, with the rows of that date."""
    old: dict[str, list[Price]] = {}
    for row in rows:
        if not 0 <= row.age_days(today) <= OLD_AFTER_DAYS:
            old.setdefault(row.date, []).append(row)
    return [
        f"prices of {date} are {group[0].age_days(today)} days old; give the present ones with --prices: "
        + ", ".join(row.key for row in group)
        for date, group in sorted(old.items())
    ]


def _rows(path: Path) -> tuple[Price, ...]:
    try:
        rows = parse(_PriceFile, load_yaml(path)).rows
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    keys = [row.key for row in rows]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"{path}: more than one row for {', '.join(repeated)}; keep one")
    return rows
