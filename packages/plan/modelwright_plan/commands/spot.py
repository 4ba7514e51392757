"""`modelwright plan spot`: the interval between checkpoints on spot instances, and the time and cost of a job."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from modelwright.core.artifacts import writing
from modelwright.core.config import ConfigError
from modelwright_plan.commands.cost import add_price_options

if TYPE_CHECKING:
    from modelwright_plan.run_cost import MeasuredRate
    from modelwright_plan.spot import SpotJob


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--work-hours", type=float, required=True, metavar="H", help="hours of the job without interruptions")
    add("--run", metavar="RUN", default="",
        help="take stall, recovery and rate of interruptions from the measurements of this run")  # fmt: skip
    add("--stall-s", type=float, metavar="S", help="seconds for which a checkpoint stalls training")
    add("--recovery-s", type=float, metavar="S", help="seconds from an interruption until training resumes")
    add("--interruptions-per-hour", type=float, metavar="N", help="rate of all instances together")
    add("--nodes", type=int, default=1, metavar="N", help="number of instances of the job (default: 1)")
    add_price_options(parser)
    add(
        "--factor",
        type=float,
        default=2.0,
        metavar="X",
        help="largest factor of error of the assumptions (default: 2)",
    )
    add("--skypilot", type=Path, metavar="FILE", help="write the plan as a SkyPilot task")
    add("--target", metavar="RECIPE|CONFIG.yaml", default="", help="recipe or configuration that the task runs")
    add("--bucket", metavar="NAME", default="", help="bucket for the task's run directory")
    add(
        "--extras",
        nargs="+",
        metavar="NAME",
        default=(),
        help="extras of the package that the task needs, as images",
    )
    add("--or-on-demand", action="store_true", help="use on-demand instances if no spot instance is available")
    add("--html", type=Path, metavar="FILE", help="also write the plan as a page with a tornado chart")
    add("--json", action="store_true", help="print everything as JSON")


def show(options: argparse.Namespace) -> int:
    """Prints the plan. Raises `ConfigError` for a job that cannot run."""
    from modelwright_plan.spot import plan_spot, spot_data, spot_text, spot_tornado

    if options.nodes < 1:
        raise ConfigError(f"--nodes: must be at least 1, got {options.nodes}")
    if not 1 < options.factor < math.inf:
        raise ConfigError(f"--factor: must be above 1, got {options.factor}; 2 is half to double")
    if options.skypilot and not (options.target and options.bucket):
        raise ConfigError("--skypilot: needs --target, the recipe to run, and --bucket, a bucket for its run directory")
    for name in ("target", "bucket", "extras", "or_on_demand"):
        if getattr(options, name) and not options.skypilot:
            raise ConfigError(f"--{name.replace('_', '-')}: describes a task; give --skypilot FILE, too")
    task_name = _task_name(options.target) if options.skypilot else ""  # its errors come before the plan
    plan = plan_spot(*_job(options))
    swings = spot_tornado(plan, factor=options.factor)
    text = spot_text(plan, swings)
    print(json.dumps(spot_data(plan, swings), indent=1) if options.json else text)
    if options.html:
        from modelwright_plan.page import write_cost_page

        write_cost_page(options.html, "the job on spot instances", text, swings, plan.usd)
    if options.skypilot:
        _write_task(options, task_name, plan.interval_s)
    return 0


def _job(options: argparse.Namespace) -> "tuple[SpotJob, MeasuredRate | None]":
    """Returns the job, and its rate of interruptions if that was measured. Given values override those of a run."""
    from modelwright.recipes.load import find_run
    from modelwright_plan.cost.prices import load_prices
    from modelwright_plan.run_cost import measured_rate, measured_recovery_s, measured_stall_s
    from modelwright_plan.spot import SpotJob

    if not options.instance:
        raise ConfigError("--instance: name the instance type, such as --instance g5.xlarge")
    run = find_run(options.run) if options.run else None
    stall_s, recovery_s, rate, measured = options.stall_s, options.recovery_s, options.interruptions_per_hour, None
    if run and stall_s is None:
        stall_s = measured_stall_s(run)
    if run and recovery_s is None:
        recovery_s = measured_recovery_s(run)
    if run and rate is None:
        measured = measured_rate(run)
        rate = measured.per_hour
    if stall_s is None:
        raise ConfigError("--stall-s: give it, or --run with a run that has saved a checkpoint")
    if rate is None:
        raise ConfigError("--interruptions-per-hour: give it, or --run with a run that was interrupted")
    if not 0 < rate < math.inf:
        raise ConfigError(f"--interruptions-per-hour: must be above 0, got {rate}")
    prices, place = load_prices(options.prices), (options.provider, options.region, options.instance)
    job = SpotJob(
        work_s=options.work_hours * 3600,
        stall_s=stall_s,
        recovery_s=recovery_s,
        mtbf_s=3600 / rate,
        spot_usd=options.nodes * float(prices.price("compute", *place, "spot").dollars),
        on_demand_usd=options.nodes * float(prices.price("compute", *place, "on_demand").dollars),
    )
    return job, measured


def _task_name(target: str) -> str:
    """Returns the name of the task's run. Raises `ConfigError` for a target that other machines cannot run."""
    from modelwright.pipeline.resolve import local_inputs
    from modelwright.recipes.load import load

    if Path(target).is_dir():
        raise ConfigError(f"--target: {target} is a folder; name a recipe or a YAML file, such as its config.yaml")
    config = load(target, {}).config
    for setting, path in local_inputs(config).items():
        raise ConfigError(
            f"--target: {setting}: {path} is on this machine and not on those of the task; name an address, such as "
            "s3://bucket/texts"
        )
    return config.name


def _write_task(options: argparse.Namespace, name: str, interval_s: float) -> None:
    import yaml

    from modelwright.core.artifacts import write_atomic
    from modelwright.recipes.load import RECIPES
    from modelwright_plan.spot import SkyTask

    task = SkyTask(
        name=name,
        target=options.target,
        is_file=options.target not in RECIPES,
        extras=options.extras,
        provider=options.provider,
        region=options.region,
        instance=options.instance,
        num_nodes=options.nodes,
        bucket=options.bucket,
        interval_s=interval_s,
        falls_back=options.or_on_demand,
    ).plain()
    if not options.skypilot.parent.is_dir():
        raise ConfigError(f"--skypilot: {options.skypilot.parent} is not a folder; name a file in one that exists")
    with writing(options.skypilot):
        write_atomic(options.skypilot, yaml.safe_dump(task, sort_keys=False))
