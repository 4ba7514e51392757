"""`modelwright lineage`: the origin of a model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "lineage",
        "Show where a model comes from: its data, configuration and commits, the gate that it passed, and the same for "
        "each model before it, back to the first.",
        example="modelwright lineage runs/support-2/release --json",
    )
    parser.add_argument("target", metavar="MODEL", help="a run directory, its name, a release, or a model folder")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def lineage(words: Sequence[str]) -> int:
    """`modelwright lineage ...`"""
    options = parser().parse_args(words)
    from modelwright.recipes.load import find_target
    from modelwright_continual.lineage import trace

    found = trace(Path(options.target) if Path(options.target).is_dir() else find_target(options.target))
    print(found.as_json() if options.json else found.as_text())
    return 0


COMMAND = Command(
    name="lineage",
    run=lineage,
    parser=parser,
    summary="show which data, configuration, commits and models a model comes from",
)
