"""`modelwright requests export|prune`: exports or prunes the log of a server's requests and answers."""

import argparse
import math
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError
from modelwright.recipes.display import shown_progress

DAY_S = 86_400.0
_WHEN = "an ISO date or time (UTC unless it says otherwise), or unix seconds"
_LOG = "a run, the SQLite file of a log, or a database as requests.log names it"


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "requests",
        "Export the request and feedback log of a server, or delete old records (docs/serving.md).",
        example="modelwright requests export runs/quickstart requests.parquet --since 2026-11-01",
    )
    commands = parser.add_subparsers(dest="command", metavar="export|prune", required=True)
    export = commands.add_parser("export", help="write records to a .jsonl or .parquet file", allow_abbrev=False)
    export.add_argument("log", metavar="RUN|LOG", help=_LOG)
    export.add_argument("target", type=Path, metavar="OUT", help="ends in .jsonl or .parquet; replaced if it exists")
    export.add_argument("--since", type=_moment, default=-math.inf, metavar="TIME", help=f"from then on: {_WHEN}")
    export.add_argument("--until", type=_moment, default=math.inf, metavar="TIME", help="before then: the same")
    prune = commands.add_parser("prune", help="delete records before their retention does", allow_abbrev=False)
    prune.add_argument("log", metavar="RUN|LOG", help=_LOG)
    prune.add_argument("--older-than-days", type=float, required=True, metavar="N", help="0 deletes all")
    return parser


def requests(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    from modelwright.serve.account.database import open_database

    if options.command == "prune" and not 0 <= options.older_than_days < math.inf:
        raise ConfigError(f"--older-than-days: must be 0 or more, got {options.older_than_days}")
    location = options.log
    if not ("://" in location or location.startswith("env:") or Path(location).is_file()):
        # A run: the log of its setting, else `requests.sqlite` in its folder.
        from modelwright.pipeline.run_config import read_run_config
        from modelwright.recipes.load import find_run

        run = find_run(location)
        path = Path(run.path) / "requests.sqlite"
        location = read_run_config(run.config).requests.log
        if not location and not path.is_file():
            raise ConfigError(
                f"{run.path}: its config does not set requests.log, and {path} does not exist; name the log"
            )
        location = location or str(path)
    database = open_database(location, setting="LOG", must_exist=True)
    if options.command == "prune":
        from modelwright.serve.account.request_store import delete_before

        with closing(database):
            with database.transaction():
                count = delete_before(database, time.time() - options.older_than_days * DAY_S)
            database.vacate()  # after the transaction: SQLite returns space to the disk only outside of one
        print(f"{count:,} records deleted")
        return 0
    from modelwright.serve.account.request_store import export_records

    with closing(database), shown_progress() as display:
        count = export_records(database, options.target, since=options.since, until=options.until, progress=display)
    print(f"{count:,} records in {options.target}")
    return 0


def _moment(word: str) -> float:
    """Parse a time as Unix seconds. Raises `ArgumentTypeError`."""
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not math.isnan(seconds):
        return seconds
    try:
        moment = datetime.fromisoformat(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a date: {word!r}; write 2026-11-01 or 2026-11-01T12:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


COMMAND = Command(
    name="requests",
    run=requests,
    parser=parser,
    summary="export the log of what a server was asked and has answered, or delete old records",
)
