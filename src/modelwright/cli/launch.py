"""`modelwright launch`: runs on several hosts, or with processes that may come and go."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.run import run_words
from modelwright.core.config import ConfigError

LAUNCH_FLAGS = (
    "nproc", "nnodes", "rdzv-endpoint", "external-store", "local-addr", "run-id", "max-restarts", "join-timeout-s",
    "last-call-timeout-s", "keep-alive-timeout-s",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "launch",
        "Run on several hosts that may come and go. Start the same line on every host; the run directory must lie on a "
        "file system that all of them see. When a process or a host is lost, or one comes (back), the processes begin "
        "again from the last checkpoint, with as many copies of the model as there is room for. A host that is asked "
        "to stop (SIGTERM, Ctrl-C) saves and leaves; the others go on without it as long as there are MIN of them. "
        "Hosts find each other at HOST:PORT, on one of them or, so that any of them may go, on a machine that stays: "
        "modelwright launch --serve-rendezvous PORT.",
        example="modelwright launch --nnodes 1:2 --rdzv-endpoint HOST:29400 run quickstart",
        usage="modelwright launch [OPTIONS] run RECIPE ...   or   modelwright launch --serve-rendezvous PORT",
    )
    add_launch_options(parser)
    add = parser.add_argument
    add("--serve-rendezvous", type=int, metavar="PORT", help="only answer to hosts that look for each other")
    add("command", nargs=argparse.REMAINDER, metavar="run RECIPE ...", help="see modelwright run --help")
    return parser


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `launch_config` reads (`LAUNCH_FLAGS`)."""
    add = parser.add_argument
    add("--nproc", dest="processes", type=int, metavar="N", help="processes on each host (default: 1)")
    add("--nnodes", default="1", metavar="MIN:MAX", help="number of hosts, or least and most (default: 1)")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="address at which the hosts find each other")
    add("--external-store", action="store_true", help="a separate --serve-rendezvous answers at that address, no host")
    add("--local-addr", help="address at which other hosts reach this one (default: its network name)")
    add("--run-id", help="name of the launch, the same on all hosts (default: modelwright)")
    add("--max-restarts", type=int, metavar="N", help="restarts before the launch gives up (default: 100)")
    add("--join-timeout-s", type=int, metavar="S", help="seconds to wait for MIN hosts (default: 600)")
    add("--last-call-timeout-s", type=int, metavar="S", help="seconds in which more hosts may join then (default: 5)")
    add("--keep-alive-timeout-s", type=int, metavar="S",
        help="seconds without a heartbeat until a host counts as lost (default: 15)")  # fmt: skip


def launch(words: Sequence[str]) -> int:
    options = parser().parse_args(words)
    from modelwright.parallel.elastic import serve_rendezvous

    if options.serve_rendezvous is not None:
        print(f"hosts may look for each other at port {options.serve_rendezvous} of this machine", file=sys.stderr)
        serve_rendezvous(options.serve_rendezvous)
    if options.command[:1] != ["run"]:
        raise ConfigError("launch: ends with a run command: modelwright launch --nproc 2 run RECIPE ...")
    return run_words(options.command[1:], ["launch", *words], launch_config(options))


def launch_config(options: argparse.Namespace) -> Any:
    """Builds the `LaunchConfig` of the options of `add_launch_options`. Raises `ConfigError` with the option's name."""
    from modelwright.parallel.elastic import LaunchConfig

    least, _, most = options.nnodes.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ConfigError(f"--nnodes: {options.nnodes!r} is not a number of hosts; write 2, or 1:4 for one to four")
    given = {field.name: getattr(options, field.name, None) for field in fields(LaunchConfig)}
    given |= {"min_hosts": int(least), "max_hosts": int(most or least)}
    try:
        return LaunchConfig(**{name: value for name, value in given.items() if value is not None})
    except ConfigError as error:
        # The error names a field of `LaunchConfig`; the user knows the option.
        name, _, rest = str(error).partition(":")
        option = {"processes": "nproc", "min_hosts": "nnodes", "max_hosts": "nnodes"}.get(name, name.replace("_", "-"))
        raise ConfigError(f"--{option}:{rest}") from None


COMMAND = Command(
    name="launch",
    run=launch,
    parser=parser,
    summary="run on several hosts, or with processes that may come and go",
    is_resumable=True,
)
