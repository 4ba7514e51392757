"""`modelwright drift freeze|check|watch`: detects requests that no longer look as they did at the model's release."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError
from modelwright.recipes.display import choose_display

WEBHOOK_VARIABLE = "MODELWRIGHT_DRIFT_WEBHOOK"


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "drift",
        "Compare requests with a frozen reference of earlier ones (docs/drift.md).",
        example="modelwright drift freeze requests.jsonl --reference drift/v1 --model models/my-model",
    )
    commands = parser.add_subparsers(dest="command", metavar="freeze|check|watch", required=True)
    freeze = commands.add_parser("freeze", help="freeze a reference of current requests", allow_abbrev=False)
    freeze.add_argument("sources", metavar="REQUESTS", nargs="+", help="exported requests, .jsonl or .parquet")
    freeze.add_argument("--window", type=int, default=1000, metavar="N", help="requests per window (1,000)")
    freeze.add_argument(
        "--run-length", type=float, default=200.0, metavar="N", help="mean number of windows between false alarms (200)"
    )
    freeze.add_argument(
        "--min-effect", type=float, default=0.03, metavar="SHARE", help="smallest shift that raises an alarm (0.03)"
    )
    freeze.add_argument("--seed", type=int, default=0, help="seed of the resampling (0)")
    check = commands.add_parser("check", help="report on each window; exits with 4 if one drifted", allow_abbrev=False)
    check.add_argument("sources", metavar="REQUESTS", nargs="+", help="exported requests, .jsonl or .parquet")
    check.add_argument("--json", action="store_true", help="print a JSON object for each window")
    watch = commands.add_parser("watch", help="follow a growing file and deliver alarms", allow_abbrev=False)
    watch.add_argument("source", metavar="REQUESTS", type=Path, help="a .jsonl file that grows")
    watch.add_argument(
        "--state",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the watcher's state: position in the file and undelivered alarms",
    )
    watch.add_argument("--webhook", default="", metavar="URL", help=f"address for alarms; or set {WEBHOOK_VARIABLE}")
    watch.add_argument(
        "--cooldown", type=int, default=10, metavar="N", help="windows until a feature can raise an alarm again (10)"
    )
    watch.add_argument("--poll", type=float, default=5.0, metavar="S", help="seconds between polls of the file (5)")
    watch.add_argument("--first-retry", type=float, default=1.0, metavar="S", help="pause after a failed delivery (1)")
    watch.add_argument("--max-retry", type=float, default=60.0, metavar="S", help="longest pause between attempts (60)")
    watch.add_argument("--once", action="store_true", help="end when everything is checked and delivered")
    for command in (freeze, check, watch):
        command.add_argument("--reference", type=Path, required=True, metavar="DIR", help="folder of the reference")
        command.add_argument("--model", type=Path, metavar="MODEL_FOLDER", help="served model, for perplexities")
    return parser


def drift(words: Sequence[str]) -> int:
    """`modelwright drift`"""
    options = parser().parse_args(words)
    return _COMMANDS[options.command](options)


def _freeze(options: argparse.Namespace) -> int:
    from modelwright_continual.drift.config import DriftConfig
    from modelwright_continual.drift.reference import freeze_reference
    from modelwright_continual.drift.requests import read_requests

    config = DriftConfig(
        window_requests=options.window,
        run_length=options.run_length,
        min_effect=options.min_effect,
        seed=options.seed,
    )
    display = choose_display(sys.stderr)
    try:
        records = read_requests(options.sources)
        reference = freeze_reference(records, options.model, options.reference, config, display)
    finally:
        display.end()
    print(f"{options.reference}: {len(records):,} requests, {reference.num_windows} windows")
    print(reference.calibration_line())
    if warning := reference.warning():
        print(f"modelwright: {warning}", file=sys.stderr)
    return 0


def _check(options: argparse.Namespace) -> int:
    from modelwright_continual.drift.check import check_windows
    from modelwright_continual.drift.reference import load_reference
    from modelwright_continual.drift.report import as_text
    from modelwright_continual.drift.requests import read_requests

    reference = load_reference(options.reference, options.model)
    records = read_requests(options.sources)
    size = reference.config.window_requests
    if len(records) < size:
        raise ConfigError(
            f"{', '.join(options.sources)}: {len(records):,} requests do not fill a window of {size:,}; wait for more"
        )
    num_alarms, num_windows = 0, 0
    for report in check_windows(records, reference):
        print(json.dumps(report.as_json(), ensure_ascii=False) if options.json else as_text(report), flush=True)
        num_alarms, num_windows = num_alarms + report.alarm, num_windows + 1
    if not options.json:
        print(f"{num_alarms} of {num_windows} windows drifted; {reference.calibration_line()}")
    return 4 if num_alarms else 0


def _watch(options: argparse.Namespace) -> int:
    from modelwright_continual.drift.config import WatchConfig
    from modelwright_continual.drift.reference import load_reference
    from modelwright_continual.drift.watch import watch
    from modelwright_continual.drift.webhook import check_webhook

    webhook = options.webhook or os.environ.get(WEBHOOK_VARIABLE, "")
    if webhook:
        check_webhook(webhook)
    config = WatchConfig(
        cooldown_windows=options.cooldown,
        poll_s=options.poll,
        first_retry_s=options.first_retry,
        max_retry_s=options.max_retry,
    )
    reference = load_reference(options.reference, options.model)
    watch(options.source, reference, options.state, webhook, config, choose_display(sys.stderr), once=options.once)
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"freeze": _freeze, "check": _check, "watch": _watch}


COMMAND = Command(
    name="drift",
    run=drift,
    parser=parser,
    summary="detect requests that no longer look as they did when the model was released",
)
