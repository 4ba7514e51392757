"""The claims page, written from judged records: each promise of the guides with where it stands; and a page a claim."""

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from modelwright_claims.age import Age, Ages
from modelwright_claims.claim import Claim
from modelwright_claims.promises import CAUSES, Promise, answer
from modelwright_claims.results import FIGURES, FILE, answers_present_claim, is_dirty, is_loaded, newest, shown_kind

HEADER = """# Claims

The guides promise {num_promises} figures and directions. Where they stand by our own measurements: {counts}.

A figure is a mean over paired repeats with one-sided 95% bounds. A promise **holds** if its claim is met and the bounds
reach it, **in part** if the claim asks for more, measures something smaller, or its record has a reservation. *Then*: a
verdict on an earlier comparison or target. Names lead to samples, command and machine. Age: *load* (a busy machine),
*edits* (sources that differed from a commit), *code* (measured definitions have changed since).
"""
_FILES_SHOWN = 4
UNTESTED = "untested.md"
"""The page of the promises that no claim tests, in the folder of the claims' pages."""
GROUPS = (
    "holds",
    "holds in part",
    *(f"does not hold here ({cause})" for cause in CAUSES),
    "not judged",
    "not measured yet",
    "cannot be tested here",
)
BEYOND = "beyond the guides"


def render(
    claims: Sequence[Claim],
    records: Sequence[Mapping[str, Any]],
    promises: Sequence[Promise],
    ages: Ages = MappingProxyType({}),
    *,
    folder: str = "claims",
) -> str:
    """Return the page as Markdown: one table of the promises by where they stand, and of the claims that no guide asks
    for. A row has the number of the promise, the figures here, the claim with its verdict, a reason and an age.

    records: from `results.judged_for_page`; ages: of those records whose age is known; folder: of the claims' pages.
    """
    known = {claim.name: claim for claim in claims}
    linked = set[str]()

    def row(
        number: int | str, text: str, figures: Iterable[str], claim: str, why: str, record: Mapping[str, Any] | None
    ) -> str:
        name = f"[no claim]({folder}/{UNTESTED}#promise-{number})"
        if claim:
            anchor = "" if claim in linked else f'<a id="{claim}"></a>'
            kind = f": {shown_kind(known[claim], record)}" if record else ": not measured yet"
            name = f"{anchor}[{claim}]({folder}/{claim}.md){kind}"
            linked.add(claim)
        cells = (str(number), text, "; ".join(figures), name, why, _age_cell(record, ages))
        return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"

    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    for number, promise in enumerate(promises, start=1):
        found = answer(promise, records)
        cause = f" ({promise.cause})" if found.standing == "does not hold here" else ""
        shown = map(show, found.shown.values())
        groups[found.standing + cause].append(
            row(number, promise.text, shown, promise.claim, promise.why, found.record)
        )
    counts = "; ".join(f"{group} {len(rows)}" for group, rows in groups.items())
    header = HEADER.format(num_promises=len(promises), counts=counts)
    lines = [textwrap.fill(line, 120) if len(line) > 120 else line for line in header.splitlines()]
    groups[BEYOND] = []
    named = {promise.claim for promise in promises}
    for claim in claims:
        if claim.name not in named:
            record = newest([one for one in records if one["name"] == claim.name])
            figures = headline(claim, record) if record else {}
            shown = [f"{name} {show(figure)}" for name, figure in list(figures.items())[:2]]
            groups[BEYOND].append(row("", claim.published, shown, claim.name, "", record))
    lines += ["", "| | promised | here | claim and verdict | why, or but | age |", "|" + " --- |" * 6]
    for group, rows in groups.items():
        lines += [f"| | **{group[0].upper()}{group[1:]}** | | | | |", *rows] if rows else []
    return "\n".join(lines) + "\n"


def render_untested(promises: Sequence[Promise], *, page: str = "claims.md") -> str:
    """Return the page of the promises that no claim tests: where each was made, and why there are no samples."""
    lines = ["# Promises without a claim", "", f"There are no samples of these. All promises: [{page}](../{page})."]
    for number, promise in enumerate(promises, start=1):
        if not promise.claim:
            reason = "Cannot be tested here, because" if promise.cause == "machine" else "Not measured yet:"
            lines += [
                "",
                f'<a id="promise-{number}"></a>**{promise.text}** (guide {promise.guide}). {reason} {promise.why}.',
            ]
    return "\n".join(lines) + "\n"


def render_claim(
    claim: Claim,
    records: Sequence[Mapping[str, Any]],
    ages: Ages = MappingProxyType({}),
    *,
    page: str = "claims.md",
    samples: str = "",
) -> str:
    """Return the page of one claim as Markdown, with every machine's figures.

    page: the file that links to it; samples: the folder of the records, as seen from the page.
    """
    lines = [
        f"# {claim.name}",
        "",
        claim.statement,
        "",
        f"- Source: {claim.source}",
        f"- Published: {claim.published}",
        f"- Compared here: {claim.compared}",
        f"- Target: {claim.target}",
        f"- Command: `modelwright prove {claim.name}`; all claims: [{page}](../{page})",
    ]
    for record in records:
        lines += ["", *_measurement(claim, record, _age(record, ages), samples)]
    return "\n".join(lines if records else [*lines, "", "Not measured yet."]) + "\n"


def headline(claim: Claim, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that answer a claim: those that it names, or the first three."""
    figures = record[FIGURES]
    names = [name for name in claim.headline if name in figures] or list(figures)[:3]
    return {name: figures[name] for name in names}


def show(figure: Mapping[str, Any]) -> str:
    """A figure with spread, bounds and unit: `1.53 ± 0.04 [1.49, 1.57] x`, with as many digits as carry meaning."""
    text = number(figure["value"])
    if figure["spread"]:
        text += f" ± {number(figure['spread'])}"
    if "lower" in figure:
        text += f" [{number(figure['lower'])}, {number(figure['upper'])}]"
    return f"{text} {figure['unit']}".strip()


def number(value: float) -> str:
    """Four significant digits; scientific below 1e-3; thousands grouped from 10,000 on."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def machine_words(machine: Mapping[str, Any]) -> str:
    """Return a machine in words: the accelerator, or the processor with its cores and instruction set."""
    processor = f"{machine['processor']} {machine.get('model', '')}".strip()
    return machine.get("accelerator", f"{processor}, {machine['cores']} cores, {machine['instruction_set']}")


def _age_cell(record: Mapping[str, Any] | None, ages: Ages) -> str:
    if record is None:
        return ""
    marks = ["load"] * is_loaded(record) + ["edits"] * is_dirty(record)
    if age := _age(record, ages):
        marks += [f"{age.num_commits} commits", *(["code"] if age.changed else [])]
    return ", ".join([record["date"], *marks])


def _age(record: Mapping[str, Any], ages: Ages) -> Age | None:
    return ages.get((record["name"], record["commit"]))


def _age_words(age: Age | None) -> str:
    if age is None:
        return ""
    rest = len(age.changed) - _FILES_SHOWN
    files = ", ".join(age.changed[:_FILES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
    return f", {age.num_commits} commits old" + (f" (**code changed since**: {files})" if files else "")


def _measurement(claim: Claim, record: Mapping[str, Any], age: Age | None, samples: str) -> list[str]:
    conditions = "; ".join(f"{key} {value}" for key, value in record["conditions"].items())
    conditions = re.sub(r"[\[\]<]", r"\\\g<0>", conditions)  # messages of other programs are no links and no HTML
    earlier = [
        f"- {what}, when this was measured: {record[text]}"
        for what, text in (("Statement", "statement"), ("Compared", "compared"), ("Target", "target"))
        if record[text] != getattr(claim, text)
    ]
    kind = shown_kind(claim, record).capitalize()
    return [
        f"{f'**{kind}**' if answers_present_claim(claim, record) else f'*{kind}*'}: {record['reason']}",
        *(["", *earlier] if earlier else []),
        "",
        "| figure | value |",
        "| --- | --- |",
        *[f"| {key} | {show(figure)} |" for key, figure in record[FIGURES].items()],
        "",
        f"[Samples]({samples}/{quote(record[FILE])}). {_circumstances(record, age)} {conditions}",
    ]


def _circumstances(record: Mapping[str, Any], age: Age | None) -> str:
    depth = "quick measurement" if record["quick"] else "measured"
    load = record["load_at_start"][0] if record.get("load_at_start") else "unknown"
    return (
        f"{machine_words(record['machine'])}; {record['threads']} thread(s); "
        f"torch {record['versions'].get('torch', '?')}; "
        f"load {load} at the start on {record['machine']['cores']} cores{' (**high**)' if is_loaded(record) else ''}; "
        f"commit {record['commit'] or 'unknown'}{' (**uncommitted changes**)' if is_dirty(record) else ''}"
        f"{_age_words(age)}; "
        f"{depth} on {record['date']} in {record['wall_s']:.0f} s."
    )
