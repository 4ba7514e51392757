"""`modelwright federated simulate|app`: fine-tune a model over clients that keep their data."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.parsers import Command, new_parser
from modelwright.core.artifacts import make_folder, write_atomic
from modelwright.core.config import ConfigError

APP_NAME = "modelwright-federated-app"
APP = """\
[project]
name = "{name}"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "modelwright"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
model = "{model}"
settings = "{settings}"
dir = "{dir}"
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `modelwright federated`."""
    parser = new_parser(
        "federated",
        "Fine-tune a model over clients that keep their data (docs/federated.md).",
        example="modelwright federated simulate runs/base --rows runs/a runs/b --settings f.yaml --dir federated",
    )
    commands = parser.add_subparsers(dest="command", metavar="simulate|app", required=True)
    simulate = commands.add_parser(
        "simulate", help="run server and clients on this machine, by Flower's simulation", allow_abbrev=False
    )
    simulate.add_argument(
        "--rows",
        nargs="+",
        required=True,
        metavar="RUN",
        help="runs whose packed rows are trained on, one for each client",
    )
    simulate.add_argument("--stage", default="", help="stage whose rows are trained on (default: the last)")
    simulate.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="number of clients that train at a time"
    )
    app = commands.add_parser(
        "app", help="write the app that `flwr run` starts on machines of your own", allow_abbrev=False
    )
    app.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the app")
    for command in (simulate, app):
        command.add_argument("model", metavar="RUN|MODEL_FOLDER", help="model to start from")
        command.add_argument(
            "--settings",
            type=Path,
            required=True,
            metavar="YAML",
            help="settings file, the same for the server and all clients",
        )
        command.add_argument("--dir", type=Path, required=True, metavar="DIR", help="folder for rounds and the model")
    return parser


def federated(words: Sequence[str]) -> int:
    """`modelwright federated`"""
    options = parser().parse_args(words)
    return _simulate(options) if options.command == "simulate" else _write_app(options)


def _simulate(options: argparse.Namespace) -> int:
    from modelwright.recipes.load import find_run, find_target
    from modelwright_federated.config import load_settings
    from modelwright_federated.flower import check_flower

    config, start, folder = load_settings(options.settings), find_target(options.model), options.dir
    rows = [find_run(word) for word in options.rows]
    names = [f"{number}-{run.path.resolve().name}" for number, run in enumerate(rows)]
    if len(rows) < config.num_awaited:
        raise ConfigError(f"--rows: has {len(rows)} runs, and a round needs {config.num_awaited}; name more runs")
    if options.processes < 1:
        raise ConfigError(f"--processes: must be at least 1, got {options.processes}")
    check_flower()
    from modelwright_federated.client import FederatedClient, rows_of, run_client
    from modelwright_federated.server import simulate, train_from

    for name, run in zip(names, rows, strict=True):
        rows_of(run, config, start, options.stage, name)  # a mistake is named here, and not by every client

    def client_of(number: int) -> FederatedClient:
        name, stage = names[number], options.stage
        return run_client(name, config, start=start, rows=rows[number], stage=stage, folder=folder / "clients" / name)

    results: list[Path] = []
    simulate(
        lambda grid, context: results.append(train_from(start, config, grid, context, folder)),
        client_of,
        num_clients=len(rows),
        num_processes=options.processes,
    )
    print(results[0])
    return 0


def _write_app(options: argparse.Namespace) -> int:
    from modelwright.recipes.load import find_target
    from modelwright_federated.config import load_settings

    load_settings(options.settings)
    paths = {"model": find_target(options.model), "settings": options.settings, "dir": options.dir}
    make_folder(options.out)
    values = {key: str(path.resolve()).replace("\\", "\\\\").replace('"', '\\"') for key, path in paths.items()}
    write_atomic(options.out / "pyproject.toml", APP.format(name=APP_NAME, **values))
    for side in ("server", "client"):
        text = f"from modelwright_federated.{side} import {side}\n\napp = {side}()\n"
        write_atomic(options.out / f"{side}_app.py", text)
    print(options.out)
    return 0


COMMAND = Command(
    name="federated", run=federated, parser=parser, summary="fine-tune a model over clients that keep their data"
)
