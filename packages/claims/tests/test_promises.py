"""Each promise of the guides stands where its claim's samples put it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelwright_claims.ledger import CLAIMS, pages
from modelwright_claims.page import BEYOND, GROUPS, machine_words
from modelwright_claims.promises import CAUSES, NO_CLAIM_CAUSES, RELATIONS, Promise, answer, reaches, read_promises
from modelwright_claims.results import judged_for_page, read_results

ROOT = Path(__file__).parents[3]
PROMISES = read_promises()


def record(kind: str = "met", *, present: bool = True, **figure: float) -> dict[str, Any]:
    speed = {"value": 2.0, "unit": "x", "spread": 0.1, "lower": 1.9, "upper": 2.1, **figure}
    single = {"value": 4.0, "unit": "", "spread": 0.0}
    return {
        "name": "doubling", "kind": kind,
        "figures": {"speed": speed, "exact": single | {"exact": True}, "single": single},
        "quick": False, "date": "2026-01-01", "answers the present claim": present,
    }  # fmt: skip


def promise(figure: str, relation: str, limit: float) -> Promise:
    return Promise(guide="000", text="t", why="w", cause="size", claim="doubling", asks=[(figure, relation, limit)])


def test_all_promises_of_the_guides_are_listed_in_their_order() -> None:
    assert [one.guide for one in PROMISES] == sorted(one.guide for one in PROMISES)
    assert len(PROMISES) == 73
    names = {claim.name for claim in CLAIMS}
    for one in PROMISES:
        assert one.text
        assert 0 < len(one.why.split()) <= 20, one.text
        assert one.claim in names or (not one.claim and not one.asks and one.cause in NO_CLAIM_CAUSES), one.text
        assert all(relation in RELATIONS for _, relation, _ in one.asks)
        assert not one.asks or one.cause in CAUSES, one.text


def test_the_figures_that_are_asked_for_are_computed_or_known_to_be_missing() -> None:
    """A misspelled figure would never hold."""
    by_name = {claim.name: claim for claim in CLAIMS}
    records = [judged_for_page(by_name[one["name"]], one) for one in read_results(ROOT / "benchmarks/results")]
    missing = {
        name
        for one in PROMISES
        if one.claim in {record["name"] for record in records} - {"three_dimensional_parallelism"}
        for name, _, _ in one.asks
        if name not in answer(one, records).shown
    }
    assert missing == {"energy saved"}  # no machine of ours has a meter


@pytest.mark.parametrize(
    ("relation", "limit", "holds"),
    [
        (">=", 1.9, True),
        (">=", 1.95, False),
        ("<=", 2.1, True),
        ("<=", 2.05, False),
        (">", 1.9, False),
        ("<", 2.1, False),
    ],
)
def test_the_bound_is_asked_and_not_the_mean(relation: str, limit: float, holds: bool) -> None:
    assert (answer(promise("speed", relation, limit), [record()]).standing == "holds") == holds


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_a_figure_without_bounds_reaches_nothing_but_may_miss(spread: float) -> None:
    figure = {"value": 2.0, "unit": "x", "spread": spread}
    assert reaches(figure, ">=", 1.0) is None
    assert reaches(figure, ">=", 3.0) is False
    assert reaches(figure | {"exact": True}, ">=", 2.0) is True
    assert reaches(None, ">=", 2.0) is None


def test_where_a_promise_stands() -> None:
    reached, missed = promise("speed", ">=", 1.9), promise("speed", ">=", 3.0)
    assert answer(reached, [record("short")]).standing == "holds in part"
    assert answer(reached, [record(present=False)]).standing == "holds in part"
    assert answer(missed, [record()]).standing == "does not hold here"
    assert answer(promise("exact // exact", "<=", 1.0), [record()]).standing == "holds"
    assert answer(promise("gone", ">=", 0.0), [record()]).standing == "not judged"
    assert answer(promise("single", ">=", 0.0), [record()]).standing == "not judged"
    assert answer(promise("single // exact", "<=", 1.0), [record()]).standing == "not judged"
    assert answer(reached, []).standing == "not measured yet"
    for cause, standing in (("unmeasured", "not measured yet"), ("machine", "cannot be tested here")):
        assert answer(Promise(guide="000", text="t", why="w", cause=cause), [record()]).standing == standing
    assert answer(replace(reached, scaled_down=True), [record()]).standing == "holds in part"
    assert answer(replace(missed, scaled_down=True), [record()]).standing == "does not hold here"
    newer = record("short", lower=0.1) | {"date": "2026-02-01"}
    assert answer(reached, [newer, record()]).standing == "does not hold here"
    assert answer(missed, [record("cannot be tested here")]).standing == "cannot be tested here"


def test_two_clicks_lead_from_each_promise_to_samples_command_and_machine() -> None:
    """The first click is the row's link to a page, the second one of that page's: its record has the machine."""
    page = ROOT / "docs/claims.md"
    written = pages(ROOT / "benchmarks/results", page, aged=False)
    assert len(written[page].splitlines()) <= 107
    numbers_measured = set[int]()
    for number, one in enumerate(PROMISES, start=1):
        (row,) = re.findall(rf"^\| {number} \| .*$", written[page], re.MULTILINE)
        assert f"| {one.text} |" in row
        assert f"| {one.why} |" in row
        ((link, anchor),) = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", row)
        details = written[page.parent / link]
        if not one.claim:
            assert f'<a id="{anchor}"></a>**{one.text}**' in details
            assert one.why in details
            continue
        assert f"`modelwright prove {one.claim}`" in details
        files = re.findall(r"\[Samples\]\(([^)]+)\)", details)
        records = [json.loads((page.with_suffix("") / file).resolve().read_text(encoding="utf-8")) for file in files]
        assert all(one.claim == record["name"] and machine_words(record["machine"]) in details for record in records)
        assert records or "Not measured yet." in details
        numbers_measured |= {number for record in records if record["samples"]}
    assert len(numbers_measured) >= 54


def test_the_table_is_grouped_by_where_promises_stand() -> None:
    whole = pages(ROOT / "benchmarks/results", ROOT / "docs/claims.md", aged=False)[ROOT / "docs/claims.md"]
    titles = re.findall(r"^\| \| \*\*(.+)\*\* \| \| \| \| \|$", whole, re.MULTILINE)
    groups = [title[0].lower() + title[1:] for title in titles]
    assert groups == [group for group in (*GROUPS, BEYOND) if group in groups]
    by_group = re.split(r"^\| \| \*\*.+$", whole, flags=re.MULTILINE)[1:]
    for group, rows in zip(groups, by_group, strict=True):
        counted = re.search(rf"{re.escape(group)} (\d+)", whole.replace("\n", " "))
        assert (counted is None) == (group == BEYOND)
        assert counted is None or len(re.findall(r"^\| \d+ \|", rows, re.MULTILINE)) == int(counted[1]) > 0
