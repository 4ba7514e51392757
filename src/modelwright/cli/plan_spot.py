"""`modelwright plan spot`: how often to save a checkpoint on spot instances, and what a job on them takes and costs."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from modelwright.cli.plan_cost import add_price_options
from modelwright.core.errors import ConfigError, writing

if TYPE_CHECKING:
    from modelwright.plan.spot.measured import MeasuredRate


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--work-hours", type=float, required=True, metavar="H", help="hours of the job without interruptions")
    add("--run", metavar="RUN", default="",
        help="take stall, recovery and rate of interruptions from what was measured in this run")  # fmt: skip
    add("--stall-s", type=float, metavar="S", help="seconds that training stands still for a checkpoint")
    add("--recovery-s", type=float, metavar="S", help="seconds from an interruption until training goes on")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--interruptions-per-hour", type=float, metavar="N", help="of all instances together")
    rate.add_argument("--trace", type=Path, metavar="FILE", help="a spot trace in SkyPilot's JSON format")
    add("--bursts", type=float, nargs=3, metavar=("N", "CALM_H", "BURST_H"),
        help="interruptions per hour in bursts, and mean hours of calm and of a burst")  # fmt: skip
    add("--down-s", type=float, default=0.0, metavar="S", help="seconds until instances are there again (default: 0)")
    add("--notice-s", type=float, default=0.0, metavar="S",
        help="seconds from an announcement (SIGTERM) to the interruption (default: 0, none)")  # fmt: skip
    add("--deadline-hours", type=float, default=math.inf, metavar="H", help="change to on-demand to be done by then")
    add("--nodes", type=int, default=1, metavar="N", help="instances of the job (default: 1)")
    add_price_options(parser)
    add("--samples", type=int, default=200, metavar="N", help="simulated courses (default: 200)")
    add("--factor", type=float, default=2.0, metavar="X", help="how far assumptions may be off (default: twofold)")
    add("--skypilot", type=Path, metavar="FILE", help="write the plan as a SkyPilot task")
    add("--target", metavar="RECIPE|CONFIG.yaml", default="", help="what the task runs")
    add("--bucket", metavar="NAME", default="", help="bucket for the task's run directory")
    add("--extras", nargs="+", metavar="NAME", default=(), help="extras of the package that the task needs, as images")
    add("--html", type=Path, metavar="FILE", help="write the plan as a page with a tornado chart, too")
    add("--json", action="store_true", help="print everything as JSON")


def show(options: argparse.Namespace) -> int:
    """Print the plan. Raises `ConfigError` for a job or a deadline that cannot be."""
    from modelwright.plan.spot.format_plan import spot_data, spot_text
    from modelwright.plan.spot.plan import plan_spot, spot_tornado

    for name in ("nodes", "samples"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}: must be at least 1, got {getattr(options, name)}")
    if not 1 < options.factor < math.inf:
        raise ConfigError(f"--factor: must be above 1, got {options.factor}; 2 is half to double")
    if options.skypilot and not (options.target and options.bucket):
        raise ConfigError("--skypilot: needs --target, what to run, and --bucket, where to keep its run directory")
    measured = _measured_rate(options)
    task_name = _task_name(options.target) if options.skypilot else ""
    plan = plan_spot(_job(options, measured), num_samples=options.samples)
    swings = spot_tornado(plan, factor=options.factor, num_samples=options.samples)
    text = spot_text(plan, swings, measured)
    print(json.dumps(spot_data(plan, swings, measured), indent=1) if options.json else text)
    if options.html:
        from modelwright.pipeline.report.cost_page import write_cost_page

        write_cost_page(options.html, "the job on spot instances", text, swings, plan.mean_usd)
    if options.skypilot:
        _write_task(options, task_name, plan.interval_s)
    return 0


def _measured_rate(options: argparse.Namespace) -> "MeasuredRate | None":
    """The rate of the run, None where the options say when instances are there."""
    if options.trace or options.interruptions_per_hour is not None:
        return None
    if not options.run:
        raise ConfigError("--interruptions-per-hour: give it, --trace, or --run with a run that has trained")
    if options.bursts:
        raise ConfigError(
            "--bursts: needs --interruptions-per-hour, the rate between bursts; a run shows only the mean"
        )
    from modelwright.pipeline.cost import measured_rate
    from modelwright.recipes.load import find_run

    return measured_rate(find_run(options.run))


def _job(options: argparse.Namespace, measured: "MeasuredRate | None"):
    from modelwright.plan.cost.prices import load_prices
    from modelwright.plan.spot.plan import SpotJob

    if not options.instance:
        raise ConfigError("--instance: name the instance type, such as --instance g5.xlarge")
    prices, place = load_prices(options.prices), (options.provider, options.region, options.instance)
    return SpotJob(
        work_s=options.work_hours * 3600,
        costs=_costs(options),
        availability=_availability(options, measured),
        spot_usd=options.nodes * float(prices.price("compute", *place, "spot").dollars),
        on_demand_usd=options.nodes * float(prices.price("compute", *place, "on_demand").dollars),
        deadline_s=options.deadline_hours * 3600,
    )


def _costs(options: argparse.Namespace):
    """What was given, else what was measured."""
    from modelwright.plan.spot.intervals import CheckpointCosts

    stall_s, recovery_s = options.stall_s, options.recovery_s
    if options.run:
        from modelwright.pipeline.cost import measured_recovery_s, measured_stall_s
        from modelwright.recipes.load import find_run

        run = find_run(options.run)
        stall_s = measured_stall_s(run) if stall_s is None else stall_s
        recovery_s = measured_recovery_s(run) if recovery_s is None else recovery_s
    if stall_s is None or recovery_s is None:
        raise ConfigError("--stall-s: give it and --recovery-s, or --run with a run in which both were measured")
    return CheckpointCosts(stall_s=stall_s, recovery_s=recovery_s)


def _availability(options: argparse.Namespace, measured: "MeasuredRate | None"):
    from modelwright.plan.spot.availability import WithNotice

    if not 0 <= options.notice_s < math.inf:
        raise ConfigError(f"--notice-s: must not be negative, got {options.notice_s}")
    if options.notice_s and not math.isinf(options.deadline_hours):
        raise ConfigError("--notice-s: the plan for a deadline makes no use of notices; leave one of them out")
    silent = _unannounced(options, measured)
    return WithNotice(inner=silent, notice_s=options.notice_s) if options.notice_s else silent


def _unannounced(options: argparse.Namespace, measured: "MeasuredRate | None"):
    """When instances are there, without notices."""
    from modelwright.plan.spot.availability import BurstyInterruptions, PoissonInterruptions, check_rate, read_trace

    if not 0 <= options.down_s < math.inf:
        raise ConfigError(f"--down-s: must not be negative, got {options.down_s}")
    if options.trace:
        if options.bursts or options.down_s:
            raise ConfigError("--trace: says itself when instances are missing; leave out --bursts and --down-s")
        return read_trace(options.trace, needed=options.nodes)
    mtbf_s = check_rate(measured.per_hour if measured else options.interruptions_per_hour)
    if not options.bursts:
        return PoissonInterruptions(mtbf_s=mtbf_s, down_s=options.down_s)
    burst_rate, calm_h, burst_h = options.bursts
    if min(calm_h, burst_h) <= 0:
        raise ConfigError("--bursts: the mean hours of calm and of a burst must be above 0")
    return BurstyInterruptions(
        calm_mtbf_s=mtbf_s,
        burst_mtbf_s=check_rate(burst_rate),
        calm_s=calm_h * 3600,
        burst_s=burst_h * 3600,
        down_s=options.down_s,
    )


def _task_name(target: str) -> str:
    """The name of the run that the task is for. Raises `ConfigError` for a target that other machines cannot run."""
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
    from modelwright.plan.spot.skypilot import SkyTask
    from modelwright.recipes.load import RECIPES

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
        falls_back=not math.isinf(options.deadline_hours),
    ).plain()
    if not options.skypilot.parent.is_dir():
        raise ConfigError(f"--skypilot: {options.skypilot.parent} is not a folder; name a file in one that exists")
    with writing(options.skypilot):
        write_atomic(options.skypilot, yaml.safe_dump(task, sort_keys=False))
