"""The table of prices: dated rows that ship with the package, and rows of a user's that replace them."""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Literal

from modelwright.core.config import load_yaml, parse
from modelwright.core.errors import ConfigError
from modelwright.core.texts import did_you_mean

Kind = Literal["compute", "storage", "retrieval", "network"]
Purchase = Literal["on_demand", "spot", "reserved_1y", "reserved_3y"]
UNITS: dict[Kind, str] = {"compute": "h", "storage": "GiB-month", "retrieval": "GiB", "network": "GiB"}
OLD_AFTER_DAYS = 180
"""Providers change list prices about once or twice a year, and spot prices daily."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """One row of the table: what one unit of something costs at a provider in a region on a date."""

    kind: Kind
    provider: str
    region: str
    name: str
    """An instance type, a storage class (`hot`, `warm`, `cold`) or a path (`internet`, `cross_zone`,
    `cross_region`)."""
    usd: str
    """US dollars per unit (`UNITS`), as a decimal number."""
    date: str
    """When the price held, as YYYY-MM-DD."""
    source: str
    """Where it is published."""
    checked: bool = False
    """Whether somebody has compared the row with its source; those that ship with the package are not checked."""
    purchase: Purchase = "on_demand"
    """How compute is bought."""
    from_gib: int = 0
    """GiB of a month from which this row applies to network traffic."""
    minimum_days: int = 0
    """Days that an object in this storage class is billed for at least."""
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
        """What identifies the row: one that a user gives replaces the row with the same key."""
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
        """The table with these rows in place of those with equal keys."""
        return PriceTable({**self.rows, **{row.key: row for row in rows}})

    def tiers(
        self, kind: Kind, provider: str, region: str, name: str, purchase: Purchase = "on_demand"
    ) -> Sequence[Price]:
        """The rows for one thing, by the amount from which they apply. Raises `ConfigError` if there is none, or none
        from 0 on.
        """
        wanted = (kind, provider, region, name, purchase)
        found = [
            row for row in self.rows.values() if (row.kind, row.provider, row.region, row.name, row.purchase) == wanted
        ]
        if not found:
            raise ConfigError(self._missing(kind, provider, region, name, purchase))
        found.sort(key=lambda row: row.from_gib)
        if found[0].from_gib:
            raise ConfigError(f"{found[0].key}: the price of the first {found[0].from_gib} GiB is missing; add a row")
        return found

    def price(self, kind: Kind, provider: str, region: str, name: str, purchase: Purchase = "on_demand") -> Price:
        """The one row for something that has no tiers."""
        return self.tiers(kind, provider, region, name, purchase)[0]

    def _missing(self, kind: Kind, provider: str, region: str, name: str, purchase: Purchase) -> str:
        rows = self.rows.values()
        places = sorted({f"{row.provider}/{row.region}" for row in rows})
        names = sorted({row.name for row in rows if (row.kind, row.provider, row.region) == (kind, provider, region)})
        bought = sorted({row.purchase for row in rows if (row.kind, row.name) == (kind, name)})
        if f"{provider}/{region}" not in places:
            problem = f"no prices for {provider}/{region}{did_you_mean(f'{provider}/{region}', places)}"
            known = f"known: {', '.join(places)}"
        elif name not in names:
            problem = f"no price of {kind} {name!r}{did_you_mean(name, names)}"
            known = f"known in {provider}/{region}: {', '.join(names) or 'none'}"
        else:
            problem, known = f"no price of {name} as {purchase}", f"known: {', '.join(bought)}"
        return f"prices: {problem}; {known}; add a row with --prices FILE"


def shipped_prices() -> PriceTable:
    """The table of the package."""
    return PriceTable({}).updated(_rows(Path(str(files("modelwright_plan.cost") / "prices.yaml"))))


def load_prices(path: Path | None) -> PriceTable:
    """The package's table, with the rows of a user's file in place of those with equal keys. Raises `ConfigError` that
    names the file and the row.
    """
    table = shipped_prices()
    return table.updated(_rows(path)) if path else table


def age_warnings(rows: Iterable[Price], *, today: datetime.date) -> list[str]:
    """One line for each date that is more than `OLD_AFTER_DAYS` ago, or in the future, with the rows known then."""
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
