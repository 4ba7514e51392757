"""`modelwright plan energy`: the start of a job that causes the least carbon dioxide."""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from modelwright.core.config import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--carbon", type=Path, required=True, metavar="CSV", help="hourly table with the columns time and g_per_kwh")
    add("--run", metavar="RUN", default="", help="take hours and watts from this run's measured energy")
    add("--hours", type=float, metavar="H", help="length of the job")
    add("--watts", type=float, metavar="W", help="mean power of the job, including the data center's overhead")
    add("--earliest", metavar="TIME", default="", help="earliest start, as 2026-01-31T14:00 (default: the table's)")
    add("--finish-by", metavar="TIME", default="", help="latest end (default: the table's end)")
    add("--country", metavar="CODE", default="", help="also show codecarbon's estimate for this country, as FRA")
    add("--json", action="store_true", help="print everything as JSON")


def show(options: argparse.Namespace) -> int:
    """Prints the start. Raises `ConfigError` for a job that does not fit."""
    from modelwright.pipeline.estimate.cost import duration
    from modelwright_plan.carbon import codecarbon_estimate, plan_start, read_carbon_table

    hours, watts = options.hours, options.watts
    if options.run:
        from modelwright.recipes.load import find_run
        from modelwright.train.monitors.energy import ENERGY_FILE, read_energy, total_energy

        files = sorted(find_run(options.run).path.glob(f"*/{ENERGY_FILE}"))
        total = total_energy([entry for path in files for entry in read_energy(path)])
        if not total.seconds:
            raise ConfigError(f"--run: {options.run} has trained nothing; give --hours and --watts")
        hours = total.seconds / 3600 if hours is None else hours
        watts = total.total_joules / total.seconds if watts is None else watts
    if hours is None or watts is None:
        raise ConfigError("--hours: give it and --watts, or --run with a run that has trained")
    table = read_carbon_table(options.carbon)
    plan = plan_start(
        table,
        hours=hours,
        watts=watts,
        earliest=_time(options.earliest, "--earliest", table.start),
        finish_by=_time(options.finish_by, "--finish-by", table.start),
    )
    estimate = codecarbon_estimate(options.country, hours=hours) if options.country else None
    if options.json:
        data: dict[str, Any] = {"hours": hours, "watts": watts, "saved_share": plan.saved_share}
        for name, start in (("at_once", plan.at_once), ("best", plan.best)):
            data[name] = {**vars(start), "time": start.time.isoformat()}
        if estimate:
            data["codecarbon_estimate"] = vars(estimate)
        print(json.dumps(data, indent=1))
        return 0
    print(f"{duration(hours * 3600)} at {watts:,.0f} W = {watts * hours / 1000:,.3g} kWh")
    for name, start in (("first start", plan.at_once), ("best start", plan.best)):
        print(f"{name:<12} {start.time.isoformat()}  {start.co2_g:,.0f} g CO2 ({start.g_per_kwh:,.0f} g per kWh)")
    print(f"{'saved':<12} {plan.saved_share:.0%}")
    if estimate:
        print(
            f"codecarbon {estimate.version}, an estimate: this machine under load draws {estimate.watts:,.1f} W "
            f"(processor {estimate.cpu_watts:,.1f}, memory {estimate.ram_watts:,.1f}, GPU {estimate.gpu_watts:,.1f}; "
            f"without the data center's share), so {duration(hours * 3600)} take {estimate.kwh:,.3g} kWh and cause "
            f"{estimate.co2_g:,.3g} g CO2 at {estimate.country}'s mean of {estimate.g_per_kwh:,.0f} g per kWh"
        )
    return 0


def _time(text: str, name: str, like: datetime.datetime) -> datetime.datetime | None:
    """Parses a time that can be compared with those of the table; returns None for ""."""
    if not text:
        return None
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not a time; write 2026-01-31T14:00") from None
    if (time.tzinfo is None) != (like.tzinfo is None):
        zone = "a time zone, as the table has" if like.tzinfo else "no time zone, as the table has none"
        raise ConfigError(f"{name}: {text!r} must have {zone}")
    return time
