"""`modelwright doctor`: what this machine can do, and what limits a training on it."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.display import choose_display
from modelwright.cli.overrides import read_overrides
from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.recipes import recipe_names
from modelwright.core.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "doctor",
        "Survey this machine: rates at a model's own shapes, memory, disk and network. With a target also what limits "
        "its training here, which techniques help, and what published rules of thumb say (docs/planning.md).",
        example="modelwright doctor quickstart --nproc 2",
    )
    add = result.add_argument
    add("target", nargs="?", default="", metavar="RECIPE|CONFIG.yaml|RUN", help="what to advise on (default: nothing)")
    add("--json", action="store_true", help="print everything as JSON")
    add("--seconds", type=float, default=2.0, metavar="S", help="time for the rates of each format (default: 2)")
    add("--nproc", type=int, default=0, metavar="N", help="processes here that would train together (default: a run's "
        "own, or 2)")  # fmt: skip
    add("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR",
        help="results of the claims, for the gains that techniques had (default: benchmarks/results)")  # fmt: skip
    add("--folder", type=Path, metavar="DIR", help="folder whose disk is measured (default: runs)")
    add("--skip", nargs="+", default=[], metavar="PART",
        help="leave out: rates, memory, disk, loopback, gloo, accelerator")  # fmt: skip
    add("--interruptions-per-hour", type=float, default=0.0, metavar="N",
        help="of all processes together, for the interval of checkpoints")  # fmt: skip
    return result


def doctor(words: Sequence[str]) -> int:
    """`modelwright doctor`"""
    options = parser().parse_args(words)
    if not 0 < options.seconds < math.inf:
        raise ConfigError(f"--seconds: must be above 0, got {options.seconds}")
    if options.nproc < 0:
        raise ConfigError(f"--nproc: must be at least 1, got {options.nproc}")
    if not 0 <= options.interruptions_per_hour < math.inf:
        raise ConfigError(f"--interruptions-per-hour: must not be negative, got {options.interruptions_per_hour}")
    from modelwright.pipeline.doctor import DoctorOptions, examine, usual_processes
    from modelwright.recipes.load import load

    target = options.target or "quickstart"
    config = load(target, {}).config
    num_processes = options.nproc or usual_processes(Path(target), config.parallel)
    rate = options.interruptions_per_hour
    doctor_options = DoctorOptions(
        as_json=options.json,
        budget_s=options.seconds,
        num_processes=num_processes,
        results=options.results,
        folder=options.folder,
        skipped=options.skip,
        mtbf_s=3600 / rate if rate else 0.0,
        with_advice=bool(options.target),
        refusal=lambda settings: _refusal(target, settings, num_processes),
    )
    print(examine(config, doctor_options, choose_display(sys.stderr)))
    return 0


def _refusal(target: str, settings: Sequence[str], num_processes: int) -> str:
    """Why training would not begin with these settings over the target's."""
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


COMMAND = Command(
    name="doctor",
    run=doctor,
    parser=parser,
    targets=recipe_names,
    summary="survey this machine, and say what limits a training on it",
)
