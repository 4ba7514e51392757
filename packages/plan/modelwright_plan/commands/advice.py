"""`modelwright plan advice TARGET`: the resource that limits a training on this machine, and remedies."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.doctor import add_measuring_options, check_seconds
from modelwright.core.config import ConfigError, read_overrides
from modelwright.recipes.display import choose_display


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="RECIPE|CONFIG.yaml|RUN")
    add_measuring_options(parser)
    add("--nproc", type=int, default=0, metavar="N", help="number of processes on this machine that train together "
        "(default: a run's own, or 2)")  # fmt: skip
    add("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR",
        help="results of the claims on techniques (default: benchmarks/results)")  # fmt: skip
    add("--interruptions-per-hour", type=float, default=0.0, metavar="N",
        help="rate of all processes together, for the interval of checkpoints")  # fmt: skip


def show(options: argparse.Namespace) -> int:
    """Prints the survey and the advice. Raises `ConfigError` for a layout that does not divide the processes."""
    budget_s, rate = check_seconds(options.seconds), options.interruptions_per_hour
    if options.nproc < 0:
        raise ConfigError(f"--nproc: must be at least 1, got {options.nproc}")
    if not 0 <= rate < math.inf:
        raise ConfigError(f"--interruptions-per-hour: must not be negative, got {rate}")
    from modelwright.pipeline.doctor import RATES, examine
    from modelwright.recipes.load import load
    from modelwright_plan.advice.run_advice import AdviceOptions, advise_run, check_layout, usual_processes

    if RATES in options.skip:
        raise ConfigError(f"--skip: advice for a training needs {RATES}; leave it in")
    config = load(options.target, {}).config
    num_processes = options.nproc or usual_processes(Path(options.target), config.parallel)
    check_layout(config, num_processes)
    found = examine(
        config, budget_s=budget_s, folder=options.folder, skipped=options.skip, progress=choose_display(sys.stderr)
    )
    asked = AdviceOptions(
        num_processes=num_processes,
        results=options.results,
        mtbf_s=3600 / rate if rate else 0.0,
        refusal=lambda settings: refusal_of(options.target, settings, num_processes),
    )
    advice = advise_run(config, asked, found)
    print(json.dumps({**found.data, **advice.data}, indent=1) if options.json else f"{found.text}\n\n{advice.text}")
    return 0


def refusal_of(target: str, settings: Sequence[str], num_processes: int) -> str:
    """Returns why training would not begin with these settings over the target's; "" if it would."""
    from modelwright.pipeline.run_config import run_schema
    from modelwright.recipes.load import load
    from modelwright.train.config import check_layout

    pairs = [(name, [value]) for name, _, value in (one.partition("=") for one in settings)]
    try:
        config = load(target, read_overrides(run_schema(), pairs)).config
        check_layout(config.first_training, config.parallel, num_processes=num_processes)
    except ConfigError as error:
        return str(error)
    return ""
