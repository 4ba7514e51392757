"""`docs/claims.md`, written from the result files: the published figure with its source beside ours."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from modelwright_claims.age import Age, Ages
from modelwright_claims.claim import Claim
from modelwright_claims.results import (
    FIGURES,
    MEASURED_FIGURES,
    all_figures,
    answers_present_claim,
    is_dirty,
    is_loaded,
    shown_kind,
)

HEADER = """# Claims

Every efficiency technique in this project comes with a published statement about it, and with what we measured.
This page is generated from `benchmarks/results/*.json` by `modelwright prove`; do not edit it, nor the records.
A target is fixed before measuring; where a comparison was changed after a first look, its conditions say so.

- **Margins.** A figure is a mean over paired repeats with its standard deviation and, in brackets, its one-sided 95%
  confidence bounds (Student's t). "At most x" is met only if the upper bound is at most x, "at least x" only if the
  lower bound is at least x. Counts of bytes and FLOPs are exact and need no repeats.
- **Verdicts.** *Short*: the samples miss a part of the target. *Not judged*: none is missed, but the record lacks
  samples that the present rule needs. *Met*: every part holds. *Cannot be tested here*: this machine cannot decide it.
- ***Met then*, *short then*.** The claim had another statement, comparison or target when this was measured, and the
  verdict is on that one. Samples that miss the present target make a record *short* even so.
- **Marks.** *High load*: more processes than there are cores wanted to compute in the minute before. *Uncommitted
  changes*: the sources differed from the commit that is named. *Commits old*: those between the measurement and the
  writing of this page. *Code changed since*: files that the measurement runs differ now; each record names them.
"""
_FILES_SHOWN = 4


def render(claims: Sequence[Claim], records: Sequence[Mapping[str, Any]], ages: Ages = MappingProxyType({})) -> str:
    """The page as Markdown: a summary table, then a section per claim with every machine's figures.

    ages: of those records whose age is known.
    """
    lines = [HEADER, "| claim | published | measured | on | verdict |", "| --- | --- | --- | --- | --- |"]
    for claim in claims:
        lines += [_summary(claim, record, _age(record, ages)) for record in _of(claim, records)] or [_unmeasured(claim)]
    for claim in claims:
        lines += ["", *_section(claim, _of(claim, records), ages)]
    return "\n".join(lines) + "\n"


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


def _of(claim: Claim, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record for record in records if record["name"] == claim.name]


def _age(record: Mapping[str, Any], ages: Ages) -> Age | None:
    return ages.get((record["name"], record["commit"]))


def _summary(claim: Claim, record: Mapping[str, Any], age: Age | None) -> str:
    figures = all_figures(record)
    names = [name for name in claim.headline if name in figures] or list(record[FIGURES] or figures)[:3]
    measured = "; ".join(f"{name} {show(_without_bounds(figures[name]))}" for name in names)
    quick = " (quick)" if record["quick"] else ""
    on = _machine(record["machine"])
    kind = shown_kind(claim, record)
    verdict = f"**{kind}**" if answers_present_claim(claim, record) else f"*{kind}*"
    verdict += "".join(f"; {mark}" for mark in _marks(record, age))
    return f"| [{claim.name}](#{claim.name}) | {claim.published} | {measured}{quick} | {on} | {verdict} |"


def _marks(record: Mapping[str, Any], age: Age | None) -> list[str]:
    """What casts doubt on the circumstances of a measurement, and how old it is."""
    marks = ["high load"] * is_loaded(record) + ["uncommitted changes"] * is_dirty(record)
    if age:
        marks += [f"{age.num_commits} commits old", *_changes(age)]
    return marks


def _changes(age: Age) -> list[str]:
    return [f"code changed since ({len(age.changed)} of {age.num_files} files)"] if age.changed else []


def _age_words(age: Age | None) -> str:
    if age is None:
        return ""
    rest = len(age.changed) - _FILES_SHOWN
    files = ", ".join(age.changed[:_FILES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
    return f", {age.num_commits} commits old" + (f" (**code changed since**: {files})" if files else "")


def _without_bounds(figure: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figure.items() if name not in ("lower", "upper")}


def _unmeasured(claim: Claim) -> str:
    return f"| [{claim.name}](#{claim.name}) | {claim.published} | not measured yet | | |"


def _section(claim: Claim, records: Sequence[Mapping[str, Any]], ages: Ages) -> list[str]:
    lines = [
        f"## {claim.name}",
        "",
        claim.statement,
        "",
        f"- Source: {claim.source}",
        f"- Published: {claim.published}",
        f"- Compared here: {claim.compared}",
        f"- Target: {claim.target}",
    ]
    for record in records:
        lines += ["", *_measurement(claim, record, _age(record, ages))]
    return lines


def _measurement(claim: Claim, record: Mapping[str, Any], age: Age | None) -> list[str]:
    conditions = "; ".join(f"{key} {value}" for key, value in record["conditions"].items())
    earlier = [
        f"- {what}, when this was measured: {record[text]}"
        for what, text in (("Statement", "statement"), ("Compared", "compared"), ("Target", "target"))
        if record[text] != getattr(claim, text)
    ]
    kind = shown_kind(claim, record).capitalize()
    lost = record.get(MEASURED_FIGURES, {})
    return [
        f"{f'**{kind}**' if answers_present_claim(claim, record) else f'*{kind}*'}: {record['reason']}",
        *(["", *earlier] if earlier else []),
        "",
        "| figure | value |",
        "| --- | --- |",
        *[f"| {key} | {show(figure)} |" for key, figure in record[FIGURES].items()],
        *[f"| {key} (as computed when measured) | {show(of)} |" for key, of in lost.items()],
        "",
        f"{_circumstances(record, age)} {conditions}",
    ]


def _circumstances(record: Mapping[str, Any], age: Age | None) -> str:
    depth = "quick measurement" if record["quick"] else "measured"
    load = record["load_at_start"][0] if record.get("load_at_start") else "unknown"
    judging = record.get("judged")
    return (
        f"{_machine(record['machine'])}; {record['threads']} thread(s); torch {record['versions'].get('torch', '?')}; "
        f"load {load} at the start on {record['machine']['cores']} cores{' (**high**)' if is_loaded(record) else ''}; "
        f"commit {record['commit'] or 'unknown'}{' (**uncommitted changes**)' if is_dirty(record) else ''}"
        f"{_age_words(age)}; "
        f"{depth} on {record['date']} in {record['wall_s']:.0f} s"
        + (f"; judged on {judging['date']} by commit {judging['commit'] or 'unknown'}." if judging else ".")
    )


def _machine(machine: Mapping[str, Any]) -> str:
    return machine.get("accelerator", f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}")
