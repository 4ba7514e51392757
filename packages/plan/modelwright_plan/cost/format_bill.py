"""A bill as text and as plain data."""

import datetime
from collections.abc import Sequence
from typing import Any

from modelwright_plan.cost.bill import Bill
from modelwright_plan.cost.prices import Kind, Price, age_warnings
from modelwright_plan.cost.sensitivity import Swing, tornado_lines

TITLES: dict[Kind, str] = {
    "compute": "compute",
    "storage": "storage",
    "retrieval": "reading from storage",
    "network": "network",
}
NOT_INCLUDED = "Not included: requests, operations, support, taxes, discounts."


def bill_text(bill: Bill, swings: Sequence[Swing], *, today: datetime.date, top: int, notes: Sequence[str] = ()) -> str:
    """Lines by kind with their prices, the total, the tornado, the prices' origins and their age."""
    width = max(len(f"{line.use}: {line.what}") for line in bill.lines)
    lines = [f"{bill.workload.name}: {bill.workload.provider} {bill.workload.region}, US dollars"]
    for kind, title in TITLES.items():
        rows = [line for line in bill.lines if line.price.kind == kind]
        if rows:
            lines += ["", f"{title:<{width + 34}}{bill.of_kind(kind):>14,.2f}"]
        for row in rows:
            words = f"{row.use}: {row.what}"
            quantity = f"{float(row.quantity):,.2f} {row.unit}"
            lines.append(f"  {words:<{width}}{quantity:>20} x {row.price.usd:<9}{row.amount:>14,.2f}")
    lines += ["", f"{'total':<{width + 34}}{bill.total:>14,.2f}", NOT_INCLUDED]
    if swings:
        lines += ["", "What the total depends on most:", *tornado_lines(swings, float(bill.total), top=top)]
    lines += ["", "Prices:"]
    for price in bill.prices:
        note = f" ({price.note})" if price.note else ""
        lines.append(f"  {price.key}: {price.usd} per {_unit(price.kind)}, {_origin(price)}{note}")
    warnings = [f"warning: {text}" for text in price_warnings(bill.prices, today=today)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes), *warnings])


def bill_data(bill: Bill, swings: Sequence[Swing], *, today: datetime.date) -> dict[str, Any]:
    """The same as plain data; amounts and prices are decimal numbers as text."""
    return {
        "name": bill.workload.name,
        "lines": [
            {
                "kind": line.price.kind,
                "use": line.use,
                "what": line.what,
                "quantity": float(line.quantity),
                "unit": line.unit,
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
    """That prices are not checked, and which are old."""
    unchecked = sum(not price.checked for price in prices)
    text = (
        f"{unchecked} of {len(prices)} prices were not compared with the provider's page; give your own with --prices"
    )
    return [*([text] if unchecked else []), *age_warnings(prices, today=today)]


def _origin(price: Price) -> str:
    return f"as of {price.date}, {price.source}" if price.checked else f"believed for {price.date}, not checked"


def _unit(kind: Kind) -> str:
    return {"compute": "hour", "storage": "GiB and month", "retrieval": "GiB", "network": "GiB"}[kind]
