"""`modelwright prove`: measure claims, or judge stored measurements again, and renew their page."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from modelwright.api.display import choose_display
from modelwright.cli.parsers import Command
from modelwright.core.errors import ConfigError

RESULTS, PAGE = Path("benchmarks/results"), Path("docs/claims.md")


def parser() -> argparse.ArgumentParser:
    """The options of `modelwright prove`."""
    parser = argparse.ArgumentParser(
        prog="modelwright prove", description="Measure published claims on this machine and renew docs/claims.md."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims to measure or to judge")
    parser.add_argument("--list", action="store_true", help="list the claims and stop")
    parser.add_argument(
        "--judge", action="store_true", help="judge the stored measurements (of NAME, or all) by the present rules"
    )
    parser.add_argument("--all", action="store_true", help="measure all of them")
    parser.add_argument("--quick", action="store_true", help="a smaller measurement, for a smoke test")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument(
        "--page", type=Path, help=f"the page to renew; default {PAGE}, or {PAGE.name} in the folder of other results"
    )
    return parser


def prove(words: Sequence[str]) -> int:
    """`modelwright prove`"""
    options = parser().parse_args(words)
    page = options.page or (PAGE if options.results == RESULTS else options.results / PAGE.name)
    from modelwright_claims import ledger, results  # PyTorch takes seconds to load

    if options.list:
        for name, statement in ledger.listing():
            print(f"{name:<24} {statement}")
        return 0
    if options.judge:
        if options.all or options.quick:
            raise ConfigError("prove: --judge measures nothing; leave out --all and --quick")
        for claim, before, after in ledger.rejudge(options.names, results=options.results, page=page):
            machine = results.machine_slug(after["machine"])
            change = describe_change(*(results.shown_kind(claim, record) for record in (before, after)))
            print(f"{claim.name:<24} {machine}: {change}: {after['reason']}")
        return 0
    if bool(options.names) == options.all:
        raise ConfigError("prove: name the claims to measure, or --all for all of them (--list shows them)")
    display = choose_display(sys.stderr)
    try:
        outcomes = ledger.prove(
            options.names, quick=options.quick, results=options.results, page=page, progress=display
        )
    finally:
        display.end()
    for claim, record in outcomes:
        print(f"{claim.name:<24} {record['kind']}: {record['reason']}")
    return 0


def describe_change(before: str, after: str) -> str:
    """Name a verdict, and the one before where it was another."""
    return after if before == after else f"{before} -> {after}"


COMMAND = Command(name="prove", run=prove, parser=parser, summary="measure the claims of the ledger on this machine")
