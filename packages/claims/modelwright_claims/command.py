"""`modelwright prove`: measure claims, or judge stored measurements again, and write their pages."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.cli.parsers import Command
from modelwright.core.config import ConfigError
from modelwright.recipes.display import choose_display
from modelwright_claims import published

PUBLISHED, PAGE, OWN = Path("benchmarks/results"), Path("docs/claims.md"), Path("claims-here")


def parser() -> argparse.ArgumentParser:
    """The options of `modelwright prove`."""
    parser = argparse.ArgumentParser(
        prog="modelwright prove",
        description="Measure published claims on this machine, and show the published figures beside yours.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims to measure or to judge")
    parser.add_argument("--list", action="store_true", help="list the claims with minutes and last verdict, and stop")
    parser.add_argument(
        "--judge",
        action="store_true",
        help="judge the published measurements (of NAME, or all) by the present rules and renew docs/claims.md",
    )
    parser.add_argument("--all", action="store_true", help="measure all of them, those that decide most first; resumes")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller measurement; a verdict only where size does not matter"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help=f"folder of the result files and of their page; default {OWN}, and {PUBLISHED} for --judge",
    )
    return parser


def prove(words: Sequence[str]) -> int:
    """`modelwright prove`"""
    options = parser().parse_args(words)
    if options.list:
        print(listing(published.read()))
        return 0
    if options.judge:
        return judge(options)
    if bool(options.names) == options.all:
        raise ConfigError("prove: name the claims to measure, or --all for all of them (--list shows them)")
    rows = published.read()
    names = options.names
    if options.all:
        names = [row.name for row in published.by_value(rows)]
        if not options.quick:
            hours = sum(row.minutes for row in rows) / 60
            print(f"{len(rows)} claims, about {hours:.1f} hours as published; the same command goes on after a stop")
    from modelwright_claims import ledger  # PyTorch takes seconds to load

    display, results = choose_display(sys.stderr), options.results or OWN
    try:
        outcomes = ledger.prove(names, quick=options.quick, results=results, progress=display)
    finally:
        display.end()
    before = {row.name: row for row in rows}
    for claim, record in outcomes:
        print(f"{claim.name:<24} {record['kind']}: {record['reason']}")
        print(side_by_side(before.get(claim.name), record))
    print(f"written to {results}; nothing published was changed")
    return 0


def judge(options: argparse.Namespace) -> int:
    """`modelwright prove --judge`"""
    if options.all or options.quick:
        raise ConfigError("prove: --judge measures nothing; leave out --all and --quick")
    from modelwright_claims import ledger, results

    folder = options.results or PUBLISHED
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder of results; name one with --results")
    page = PAGE if folder == PUBLISHED else folder / PAGE.name
    for claim, before, after in ledger.rejudge(options.names, results=folder, page=page):
        kinds = dict.fromkeys(results.shown_kind(claim, record) for record in (before, after))
        print(f"{claim.name:<24} {results.machine_slug(after['machine'])}: {' -> '.join(kinds)}: {after['reason']}")
    if folder == PUBLISHED:
        ledger.publish(folder)
    return 0


def listing(rows: Sequence[published.Published]) -> str:
    """Return the claims with the minutes of a full measurement and the last verdict, one a line."""
    lines = [f"{row.name:<30} {row.minutes:>4.0f} min  {row.verdict:<22} {row.statement}" for row in rows]
    return "\n".join([*lines, f"all together {sum(row.minutes for row in rows) / 60:.1f} hours"])


def side_by_side(row: published.Published | None, record: Mapping[str, Any]) -> str:
    """Return the published figures next to those of a new record, one a line."""
    from modelwright_claims.page import show

    theirs: Mapping[str, str] = row.figures if row else {}
    names = dict.fromkeys([*theirs, *list(record["figures"])[:3]])
    lines = [f"  {'figure':<60} {f'published ({row.machine})' if row else 'published':<44} yours"]
    for name in names:
        own = show(record["figures"][name]) if name in record["figures"] else "-"
        lines.append(f"  {name:<60} {theirs.get(name, '-'):<44} {own}")
    return "\n".join(lines)


COMMAND = Command(name="prove", run=prove, parser=parser, summary="measure the claims of the ledger on this machine")
