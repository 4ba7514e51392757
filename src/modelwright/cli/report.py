"""`modelwright report`: writes the page of a run."""

import argparse
from collections.abc import Sequence

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "report",
        "Write a run's report.html again from what is in its folder.",
        example="modelwright report runs/quickstart",
    )
    parser.add_argument("target", metavar="RUN", help="a run directory or its name")
    return parser


def report(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    from modelwright.pipeline.run_config import previous_config
    from modelwright.pipeline.stages.report import write_report
    from modelwright.recipes.load import find_run

    run = find_run(options.target)
    settings = previous_config(run)
    if settings is None:
        raise ConfigError(f"{run.path}: lacks config.yaml; run it again")
    write_report(settings, run)
    print(run.report)
    return 0


COMMAND = Command(name="report", run=report, parser=parser, summary="write a run's report.html again")
