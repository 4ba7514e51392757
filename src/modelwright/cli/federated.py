"""`modelwright federated server|client|keys`: fine-tune a model over clients that keep their data."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "federated",
        "Fine-tune a model over clients that keep their data (docs/federated.md).",
        example="modelwright federated server runs/base --settings federated.yaml --keys keys --dir federated",
    )
    commands = parser.add_subparsers(dest="command", metavar="server|client|keys", required=True)
    server = commands.add_parser("server", help="hold the model and average updates", allow_abbrev=False)
    server.add_argument("model", metavar="RUN|MODEL_FOLDER", help="the model to start from")
    server.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine only)")
    server.add_argument("--port", type=int, default=0, help="default: a free one")
    client = commands.add_parser("client", help="train on rows of a run, and send updates", allow_abbrev=False)
    client.add_argument("model", metavar="RUN|MODEL_FOLDER", help="the server's model, or one of the same shape")
    client.add_argument("--rows", required=True, metavar="RUN", help="the run whose packed rows are learned")
    client.add_argument("--stage", default="", help="pretrain, sft: whose rows they are (default: the last)")
    client.add_argument("--name", required=True, help="this client's name in the key file")
    client.add_argument("--server", required=True, metavar="HOST:PORT")
    client.add_argument("--learning-rate", type=float, required=True, metavar="RATE", help="of plain SGD")
    for command in (server, client):
        command.add_argument("--settings", type=Path, required=True, metavar="YAML", help="equal on all sides")
        command.add_argument(
            "--keys", type=Path, required=True, metavar="FILE", help="lines of a name and a secret key"
        )
        command.add_argument("--dir", type=Path, required=True, metavar="DIR", help="for its own files")
    keys = commands.add_parser("keys", help="print new secret keys, one line for each client", allow_abbrev=False)
    keys.add_argument("names", nargs="+", metavar="NAME")
    return parser


def federated(words: Sequence[str]) -> int:
    """`modelwright federated`"""
    options = parser().parse_args(words)
    return _COMMANDS[options.command](options)


def _server(options: argparse.Namespace) -> int:
    from modelwright.pipeline.federated import load_settings, serve_rounds

    result = serve_rounds(
        _find(options.model),
        load_settings(options.settings),
        keys=options.keys,
        folder=options.dir,
        host=options.host,
        port=options.port,
        note=_note,
    )
    print(result)
    return 0


def _client(options: argparse.Namespace) -> int:
    host, _, port = options.server.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--server: {options.server!r} is no address; write HOST:PORT")
    if not 0 < options.learning_rate < math.inf:
        raise ConfigError(f"--learning-rate: must be above 0, got {options.learning_rate}")
    from modelwright.pipeline.federated import load_settings, take_part
    from modelwright.recipes.load import find_run

    take_part(
        _find(options.model),
        find_run(options.rows),
        load_settings(options.settings),
        stage=options.stage,
        learning_rate=options.learning_rate,
        keys=options.keys,
        name=options.name,
        host=host,
        port=int(port),
        folder=options.dir,
        note=_note,
    )
    return 0


def _keys(options: argparse.Namespace) -> int:
    from modelwright.federated.transport import new_key

    if repeated := sorted({name for name in options.names if options.names.count(name) > 1}):
        raise ConfigError(f"keys: {', '.join(repeated)} is given twice; every client needs a name of its own")
    for name in options.names:
        print(f"{name} {new_key()}")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"server": _server, "client": _client, "keys": _keys}


def _note(line: str) -> None:
    print(f"modelwright: {line}", file=sys.stderr, flush=True)


def _find(word: str) -> Path:
    from modelwright.recipes.load import find_target

    return find_target(word)


COMMAND = Command(
    name="federated",
    run=federated,
    parser=parser,
    summary="fine-tune a model over clients that keep their data",
)
