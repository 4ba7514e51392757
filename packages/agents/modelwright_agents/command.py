"""`modelwright mcp RUNS`: lets an assistant read the runs of a folder."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "mcp",
        "Serve a folder of runs by the Model Context Protocol on standard input and output: an assistant lists runs "
        "and reads their settings, metrics, samples and figures. Nothing is written, and no file outside is read.",
        example="modelwright mcp runs",
    )
    parser.add_argument("folder", metavar="RUNS", help="folder of run directories, or one run directory")
    return parser


def serve_runs(words: Sequence[str]) -> int:
    folder = Path(parser().parse_args(words).folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name the folder that has your runs, such as runs")
    from modelwright_agents.server import run_server_over  # the library takes a second to load

    print(f"modelwright: serving the runs in {folder} on standard input and output", file=sys.stderr, flush=True)
    run_server_over(folder)
    return 0


COMMAND = Command(
    name="mcp",
    run=serve_runs,
    parser=parser,
    summary="let an assistant read your runs by the Model Context Protocol",
)
