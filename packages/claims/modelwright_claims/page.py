"""The claims page, written from judged records: each promise of the guides with where it stands; and a page a claim."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from modelwright_claims.age import Age, Ages
from modelwright_claims.claim import Claim
from modelwright_claims.promises import CAUSES, NO_CLAIM_CAUSES, Answer, Promise, answer, claims_named
from modelwright_claims.results import FIGURES, FILE, answers_present_claim, is_dirty, is_loaded, newest, shown_kind

HEADER = """# Claims

The guides promise {num_promises} figures and directions. Where they stand by our own measurements: {counts}.
`modelwright prove --judge` writes it from `benchmarks/results/*.json`; do not edit it, nor the records.

- **Holds**: the claim is met, and the figures reach the promise by their bounds. **In part**: the figures reach it, and
  the claim asks for more or its record has a reservation, which is named. **Does not hold here**: the technique does
  not give it, the experiment cannot show it, or the size of model or machine forbids it. **Not judged**: the record
  lacks what the present rule asks for, and an old verdict is none.
- A figure is a mean over paired repeats with one-sided 95% confidence bounds in brackets. "At most x" holds only if
  the upper bound does. Counts of bytes and FLOPs are exact. A target is set before measuring; *met then* and *short
  then* are verdicts on an earlier comparison, and *met then* only stands while the old samples meet the present rule.
- The name of a claim leads to its samples, command and machine. The last column is the age of the measurement, with
  *load* or *edits* where the machine was busy or the sources differed from a commit, *code* where they changed since.
"""
_FILES_SHOWN = 4
TITLES = {
    ("holds", ""): "Holds",
    ("holds in part", ""): "Holds in part",
    **{("does not hold here", cause): f"Does not hold here ({cause})" for cause in CAUSES},
    ("not judged", ""): "Not judged: to be measured again",
    ("cannot be tested here", "machine"): "Cannot be tested here",
    ("cannot be tested here", "unmeasured"): "Not measured yet",
}


def render(
    claims: Sequence[Claim],
    records: Sequence[Mapping[str, Any]],
    promises: Sequence[Promise],
    ages: Ages = MappingProxyType({}),
    *,
    folder: str = "claims",
) -> str:
    """Return the page as Markdown: the promises by where they stand, and the claims that no guide asks for.

    records: from `results.judged_for_page`; ages: of those records whose age is known; folder: of the claims' pages.
    """
    known = {claim.name: claim for claim in claims}
    linked = set[str]()

    def link(name: str) -> str:
        anchor = "" if name in linked else f'<a id="{name}"></a>'
        linked.add(name)
        return f"{anchor}[{name}]({folder}/{name}.md)"

    answers = [answer(promise, records) for promise in promises]
    groups = [_group(promise, found) for promise, found in zip(promises, answers, strict=True)]
    shares = [f"{title[0].lower()}{title[1:]} {groups.count(group)}" for group, title in TITLES.items()]
    lines = [_wrapped(HEADER.format(num_promises=len(promises), counts="; ".join(shares)))]
    for group, title in TITLES.items():
        rows = [
            _promise_row(number, promise, found, known, ages, link)
            for number, (promise, found) in enumerate(zip(promises, answers, strict=True), start=1)
            if groups[number - 1] == group
        ]
        if rows:
            lines += [
                f"## {title}",
                "",
                "| | promised | here | why, or but | claim | age |",
                "|" + " --- |" * 6,
                *rows,
                "",
            ]
    rest = [claim for claim in claims if claim.name not in set(claims_named(promises))]
    if rest:
        lines += ["## Beyond the guides", "", "| claim | published | here | verdict | age |", "|" + " --- |" * 5]
        lines += [_claim_row(claim, records, ages, link) for claim in rest]
    return "\n".join(lines).rstrip("\n") + "\n"


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


def _group(promise: Promise, found: Answer) -> tuple[str, str]:
    if found.standing.startswith(("holds", "not judged")):
        return found.standing, ""
    if found.standing == "does not hold here":
        return found.standing, promise.cause
    return found.standing, promise.cause if promise.cause in NO_CLAIM_CAUSES else NO_CLAIM_CAUSES[0]


def _promise_row(
    number: int, promise: Promise, found: Answer, claims: Mapping[str, Claim], ages: Ages, link: Callable[[str], str]
) -> str:
    here = "; ".join(show(figure) for figure in found.shown.values())
    claim, age = "", ""
    if promise.claim:
        verdict = f": {shown_kind(claims[promise.claim], found.record)}" if found.record else ""
        claim, age = f"{link(promise.claim)}{verdict}", _age_cell(found.record, ages)
    return f"| {number} | {promise.text} | {here} | {promise.why} | {claim} | {age} |"


def _claim_row(claim: Claim, records: Sequence[Mapping[str, Any]], ages: Ages, link: Callable[[str], str]) -> str:
    record = newest([one for one in records if one["name"] == claim.name])
    if record is None:
        return f"| {link(claim.name)} | {claim.published} | not measured yet | | |"
    here = "; ".join(f"{name} {show(figure)}" for name, figure in list(headline(claim, record).items())[:2])
    kind = shown_kind(claim, record)
    return f"| {link(claim.name)} | {claim.published} | {here} | {kind} | {_age_cell(record, ages)} |"


def _age_cell(record: Mapping[str, Any] | None, ages: Ages) -> str:
    if record is None:
        return ""
    marks = ["load"] * is_loaded(record) + ["edits"] * is_dirty(record)
    if age := _age(record, ages):
        marks += [f"{age.num_commits} commits", *(["code"] if age.changed else [])]
    return ", ".join([record["date"], *marks])


def _wrapped(header: str) -> str:
    """Break the one paragraph of the header whose length depends on the counts."""
    lines = header.splitlines(keepends=True)
    return "".join(textwrap.fill(line, 120) + "\n" if len(line) > 121 else line for line in lines)


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
