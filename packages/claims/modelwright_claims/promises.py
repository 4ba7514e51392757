"""The promises of the guides: the claim that tests each of them, and the limits of its figures.

`promises.toml` lists them in the order of the guides. Where a promise stands follows from a judged record alone.
"""

import importlib.resources
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from modelwright_claims.claim import UNTESTABLE
from modelwright_claims.judging import RELATIONS
from modelwright_claims.results import FIGURES, answered_today, newest

Standing = Literal[
    "holds", "holds in part", "does not hold here", "not judged", "not measured yet", "cannot be tested here"
]
CAUSES = ("technique", "experiment", "size")
"""Why a promise does not hold here."""
NO_CLAIM_CAUSES = ("machine", "unmeasured")
"""Why no claim tests a promise: no machine of ours could, or it has not been measured yet."""
RATIO = " // "


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A single promised figure or direction."""

    guide: str
    text: str
    why: str
    """What decides where it stands, or limits it, in twenty words at most."""
    cause: str = ""
    claim: str = ""
    scaled_down: bool = False
    """Whether what its claim measures is smaller than what it promises, which then holds in part at most."""
    asks: Sequence[tuple[str, str, float]] = ()
    """Figure, relation and limit; "a // b" is the ratio of two figures."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The standing of a promise by a record."""

    standing: Standing
    shown: Mapping[str, Mapping[str, Any]]
    """The figures that it asks for, as far as the record has them."""
    record: Mapping[str, Any] | None


def read_promises() -> list[Promise]:
    """Return the promises in the order of the guides."""
    text = importlib.resources.files("modelwright_claims").joinpath("promises.toml").read_text(encoding="utf-8")
    return [Promise(**promise) for promise in tomllib.loads(text)["promises"]]


def answer(promise: Promise, records: Sequence[Mapping[str, Any]]) -> Answer:
    """Return where a promise stands by the newest of the judged records of its claim.

    It holds where the claim is met now and each figure that it asks for reaches its limit by its bound; in part where
    the figures do and the claim's row has a reservation, or is about something smaller. It is not judged where the
    record lacks a figure or a bound and nothing in it misses a limit.
    """
    record = newest([record for record in records if record["name"] == promise.claim])
    if record is None and (promise.claim or promise.cause == "unmeasured"):
        return Answer(standing="not measured yet", shown={}, record=None)
    if record is None or record["kind"] == UNTESTABLE:
        return Answer(standing="cannot be tested here", shown={}, record=record)
    figures = record[FIGURES]
    shown = {name: figure for name, _, _ in promise.asks if (figure := _figure(figures, name))}
    reached = [reaches(shown.get(name), relation, limit) for name, relation, limit in promise.asks]
    is_met = record["kind"] == "met" and answered_today(record) and not promise.scaled_down
    standing: Standing = "holds" if is_met else "holds in part"
    if False in reached:
        standing = "does not hold here"
    elif None in reached or not reached:
        standing = "not judged"
    return Answer(standing=standing, shown=shown, record=record)


def reaches(figure: Mapping[str, Any] | None, relation: str, limit: float) -> bool | None:
    """Return whether the bound of a figure that bears on the limit has the relation to it.

    None where the figure is missing, or reaches the limit without a bound and is no exact count.
    """
    if figure is None:
        return None
    bound = figure.get("lower" if relation.startswith(">") else "upper", figure["value"])
    holds = RELATIONS[relation](bound, limit)
    return holds if not holds or "lower" in figure or figure.get("exact") else None


def _figure(figures: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    if RATIO not in name:
        return figures.get(name)
    above, below = (figures.get(part) for part in name.split(RATIO))
    if not above or not below:
        return None
    result = {"value": above["value"] / below["value"], "unit": "x", "spread": max(above["spread"], below["spread"])}
    return result | {"exact": True} if above.get("exact") and below.get("exact") else result
