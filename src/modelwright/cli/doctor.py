"""`modelwright doctor`: surveys the rates, memory, disk and network of this machine."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.recipes import recipe_names
from modelwright.core.config import ConfigError
from modelwright.recipes.display import choose_display


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "doctor",
        "Survey this machine: rates at a model's own shapes, memory, disk and network (docs/planning.md).",
        example="modelwright doctor quickstart",
    )
    result.add_argument("target", nargs="?", default="quickstart", metavar="RECIPE|CONFIG.yaml|RUN",
        help="whose model's products are measured (default: quickstart)")  # fmt: skip
    add_measuring_options(result)
    return result


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the measurements and their duration."""
    add = parser.add_argument
    add("--json", action="store_true", help="print everything as JSON")
    add("--seconds", type=float, default=2.0, metavar="S", help="time for the rates of each format (default: 2)")
    add("--folder", type=Path, metavar="DIR", help="folder whose disk is measured (default: runs)")
    add("--skip", nargs="+", default=[], metavar="PART",
        help="leave out: rates, memory, disk, loopback, gloo, accelerator")  # fmt: skip


def check_seconds(seconds: float) -> float:
    """Raise `ConfigError` unless the time for the rates is above 0."""
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--seconds: must be above 0, got {seconds}")
    return seconds


def doctor(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    # Checked before the imports below, which take seconds.
    budget_s = check_seconds(options.seconds)
    from modelwright.pipeline.doctor import examine
    from modelwright.recipes.load import load

    config = load(options.target, {}).config
    found = examine(
        config, budget_s=budget_s, folder=options.folder, skipped=options.skip, progress=choose_display(sys.stderr)
    )
    if options.json:
        print(json.dumps(found.data, indent=1))
        return 0
    print(found.text)
    print(f"\nwhat limits a training here, and what helps: modelwright plan advice {options.target}")
    return 0


COMMAND = Command(
    name="doctor",
    run=doctor,
    parser=parser,
    targets=recipe_names,
    summary="survey this machine: rates of products, memory, disk, network",
)
