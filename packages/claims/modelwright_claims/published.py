"""The package's summary of its published records, so that a listing or a comparison needs neither them nor PyTorch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelwright_claims.claim import Claim
    from modelwright_claims.promises import Promise

PATH = Path(__file__).with_name("published.json")
DEFAULT_MINUTES = 30.0
"""Assumed for a claim without a record: what a full measurement may take."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A single claim with its newest record, if it has one."""

    name: str
    statement: str
    num_promises: int
    """Promises of the guides that the claim tests."""
    minutes: float
    """What the measurement took."""
    verdict: str
    machine: str
    date: str
    figures: Mapping[str, str]
    """The figures that answer it, as shown on its page."""


def read() -> list[Published]:
    """Return the claims in the order of the ledger."""
    return [Published(**one) for one in json.loads(PATH.read_text(encoding="utf-8"))]


def as_json(claims: Sequence["Claim"], records: Sequence[Mapping[str, Any]], promises: Sequence["Promise"]) -> str:
    """Return the text of the file. records: judged ones, with the figures of the present rules."""
    from modelwright_claims.page import headline, machine_words, show
    from modelwright_claims.results import newest, shown_kind

    rows = []
    for claim in claims:
        record = newest([one for one in records if one["name"] == claim.name and not one["quick"]])
        rows.append(
            Published(
                name=claim.name,
                statement=claim.statement,
                num_promises=sum(promise.claim == claim.name for promise in promises),
                minutes=round(record["wall_s"] / 60, 1) if record else DEFAULT_MINUTES,
                verdict=shown_kind(claim, record) if record else "not measured yet",
                machine=machine_words(record["machine"]) if record else "",
                date=record["date"] if record else "",
                figures={name: show(figure) for name, figure in headline(claim, record).items()} if record else {},
            )
        )
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


def by_value(rows: Sequence[Published]) -> list[Published]:
    """Sort claims by the promises that they decide a minute, the most first."""
    return sorted(rows, key=lambda row: -(row.num_promises + 1) / max(row.minutes, 1.0))
