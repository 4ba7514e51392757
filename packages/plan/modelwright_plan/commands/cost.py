"""`modelwright plan cost TARGET`: the bill of training, serving, storage and traffic, and its sensitivity."""

import argparse
import datetime
import json
from pathlib import Path

from modelwright.core.config import ConfigError

TARGETS = "TARGET: a workload (a YAML file, see docs/planning.md), or a run directory, whose time and size are priced."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET")
    add_price_options(parser)
    add("--purchase", choices=("on_demand", "spot", "reserved_1y", "reserved_3y"), default="on_demand",
        help="purchase option of the run's instances (default: on_demand)")  # fmt: skip
    add("--count", type=int, default=1, help="number of instances of the run (default: 1)")
    add("--months", type=float, default=0.0, metavar="N",
        help="months for which the run's folder is stored (default: 0)")  # fmt: skip
    add("--vary", type=float, default=0.25, metavar="SHARE",
        help="largest relative error of each assumption (default: 0.25)")  # fmt: skip
    add("--top", type=int, default=8, help="number of assumptions to show (default: 8)")
    add("--html", type=Path, metavar="FILE", help="also write the bill as a page with a tornado chart")
    add("--json", action="store_true", help="print everything as JSON")


def add_price_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for prices, place and instance type."""
    add = parser.add_argument
    add("--prices", type=Path, metavar="FILE", help="rows that replace those of the package's price table")
    add("--provider", default="aws", help="cloud provider (default: aws)")
    add("--region", default="us-east-1", help="region of the provider (default: us-east-1)")
    add("--instance", default="", metavar="TYPE", help="instance type")


def show(options: argparse.Namespace) -> int:
    """Prints the bill. Raises `ConfigError` for a workload that cannot be priced."""
    from modelwright_plan.cost.bill import bill_data, bill_text, bill_tornado, make_bill
    from modelwright_plan.cost.prices import load_prices

    for name in ("count", "top"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}: must be at least 1, got {getattr(options, name)}")
    if not 0 < options.vary < 1:
        raise ConfigError(f"--vary: must be between 0 and 1, got {options.vary}; 0.25 is a quarter up and down")
    if not options.months >= 0:
        raise ConfigError(f"--months: must not be negative, got {options.months}")
    workload, notes = _workload(options)
    prices = load_prices(options.prices)
    bill = make_bill(workload, prices)
    swings = bill_tornado(bill, prices, vary=options.vary)
    today = datetime.datetime.now(datetime.UTC).date()
    text = bill_text(bill, swings, today=today, top=options.top, notes=notes)
    if options.html:
        from modelwright_plan.page import write_cost_page

        write_cost_page(options.html, workload.name, text, swings[: options.top], float(bill.total))
    print(json.dumps(bill_data(bill, swings, today=today), indent=1) if options.json else text)
    return 0


def _workload(options: argparse.Namespace):
    """Returns the workload, and notes on it."""
    from modelwright_plan.cost.workload import load_workload

    if not Path(options.target).is_dir():
        if options.instance:
            raise ConfigError("--instance: is for a run directory; a workload's file names its own instances")
        return load_workload(Path(options.target)), []
    if not options.instance:
        raise ConfigError("--instance: name the instance type to rent for the run, such as --instance g5.xlarge")
    from modelwright.recipes.load import find_run
    from modelwright_plan.run_cost import workload_of_run

    workload = workload_of_run(
        find_run(options.target),
        provider=options.provider,
        region=options.region,
        instance=options.instance,
        purchase=options.purchase,
        count=options.count,
        months=options.months,
    )
    return workload, [f"{options.instance} is taken to be as fast as the machine that the run was measured on"]
