"""`docs/claims.md`, written from the result files: the published figure with its source beside ours."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from modelwright_claims.claim import Claim

HEADER = """# Claims

Every efficiency technique in this project comes with a published statement about it, and with what we measured.
This page is generated from `benchmarks/results/*.json` by `modelwright prove`; do not edit it.
A target is fixed before measuring; where a comparison was changed after a first look, its conditions say so.
*Met*, *short* and *cannot be tested here* are all results.
"""


def render(claims: Sequence[Claim], records: Sequence[Mapping[str, Any]]) -> str:
    """The page as Markdown: a summary table, then a section per claim with every machine's figures."""
    lines = [HEADER, "| claim | published | measured | on | verdict |", "| --- | --- | --- | --- | --- |"]
    for claim in claims:
        lines += [_summary(claim, record) for record in _of(claim, records)] or [_unmeasured(claim)]
    for claim in claims:
        lines += ["", *_section(claim, _of(claim, records))]
    return "\n".join(lines) + "\n"


def show(figure: Mapping[str, Any]) -> str:
    """A figure with its unit and spread: `1.53 +- 0.04 x`, with as many digits as carry meaning."""
    value, spread, unit = figure["value"], figure["spread"], figure["unit"]
    text = number(value)
    if spread:
        text += f" ± {number(spread)}"
    return f"{text} {unit}".strip()


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


def _summary(claim: Claim, record: Mapping[str, Any]) -> str:
    figures = record["figures"]
    names = [name for name in claim.headline if name in figures] or list(figures)[:3]
    measured = "; ".join(f"{name} {show(figures[name])}" for name in names)
    quick = " (quick)" if record["quick"] else ""
    on = _machine(record["machine"])
    return f"| [{claim.name}](#{claim.name}) | {claim.published} | {measured}{quick} | {on} | **{record['kind']}** |"


def _unmeasured(claim: Claim) -> str:
    return f"| [{claim.name}](#{claim.name}) | {claim.published} | not measured yet | | |"


def _section(claim: Claim, records: Sequence[Mapping[str, Any]]) -> list[str]:
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
        lines += ["", *_measurement(claim, record)]
    return lines


def _measurement(claim: Claim, record: Mapping[str, Any]) -> list[str]:
    depth = "quick measurement" if record["quick"] else "measured"
    conditions = "; ".join(f"{key} {value}" for key, value in record["conditions"].items())
    earlier = [
        f"- {what}, when this was measured: {then}"
        for what, then, now in (
            ("Compared", record["compared"], claim.compared),
            ("Target", record["target"], claim.target),
        )
        if then != now
    ]
    return [
        f"**{record['kind'].capitalize()}**: {record['reason']}",
        *(["", *earlier] if earlier else []),
        "",
        "| figure | value |",
        "| --- | --- |",
        *[f"| {key} | {show(figure)} |" for key, figure in record["figures"].items()],
        "",
        f"{_machine(record['machine'])}; {record['threads']} thread(s); torch {record['versions'].get('torch', '?')}; "
        f"commit {record['commit'] or 'unknown'}; {depth} on {record['date']} in {record['wall_s']:.0f} s. "
        f"{conditions}",
    ]


def _machine(machine: Mapping[str, Any]) -> str:
    return machine.get("accelerator", f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}")
