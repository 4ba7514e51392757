"""The other commands: each reads its words, calls one function of the floors below, prints what comes back."""

import argparse
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.overrides import read_overrides, split_settings
from modelwright.core.errors import ConfigError, Stopped

LEAVING_S = 120
"""How long a process whose parent has gone may take to save or to finish answers."""

COMMANDS_GROUP = "modelwright.commands"
"""Entry points of other packages: functions that take a command's words and return its exit code."""

STAGE_HELP = "the model of this stage of the run: pretrain or sft (default: the last that has finished)"


def recipes(words: Sequence[str]) -> int:
    """`modelwright recipes`"""
    _parser("recipes", "List the recipes that `modelwright run` knows.").parse_args(words)
    from modelwright.recipes.load import RECIPES, recipe_file

    for name in RECIPES:
        summary = recipe_file(name).read_text(encoding="utf-8").partition("\n#\n")[0].partition("\nname:")[0]
        print(f"{name:<12} {' '.join(line.removeprefix('#').strip() for line in summary.splitlines())}")
    return 0


def config(words: Sequence[str]) -> int:
    """`modelwright config`"""
    from modelwright.cli.config import config

    return config(words)


def explain(words: Sequence[str]) -> int:
    """`modelwright explain`"""
    from modelwright.cli.config import explain

    return explain(words)


def doctor(words: Sequence[str]) -> int:
    """`modelwright doctor`"""
    parser = _parser("doctor", "Survey this machine and measure its rates at a model's own shapes.")
    parser.add_argument("target", nargs="?", default="quickstart", help="whose model (default: quickstart)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--budget", type=float, default=6.0, metavar="SECONDS", help="time for each measurement")
    options = parser.parse_args(words)
    if not 0 < options.budget < math.inf:
        raise ConfigError(f"--budget: must be a number of seconds above 0, got {options.budget}")
    from modelwright.pipeline.doctor import examine
    from modelwright.recipes.load import load

    print(examine(load(options.target, {}).config, as_json=options.json, budget_s=options.budget))
    return 0


def serve(words: Sequence[str]) -> int:
    """`modelwright serve`"""
    parser = _parser("serve", "Serve a model over HTTP as the OpenAI API does; SIGTERM or Ctrl-C drains and stops.")
    parser.usage = (
        "modelwright serve RUN|MODEL_FOLDER [--stage NAME] [--int8] [--port N] [--host H] [--engine.max_num_seqs N ...]"
    )
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--int8", action="store_true", help="serve the run's INT8 model")
    parser.add_argument("--name", default="", help="what clients call the model (default: the run's name)")
    parser.add_argument("--with-parent", action="store_true", help="stop when the process that started it has gone")
    parser.epilog = "Every other setting of the server can be given by its name, --port 0 takes a free port."
    leading, own, rest = split_settings(words, ("stage", "int8", "name", "with-parent", "help"))
    parsed = parser.parse_args([*leading, *own])
    from modelwright.core.config import dump, merge, parse
    from modelwright.pipeline.models import find_model
    from modelwright.serve.config import ServeConfig
    from modelwright.serve.server import run_server

    found = find_model(_run_or_folder(parsed.target), stage=parsed.stage, int8=parsed.int8)
    if parsed.with_parent:
        leave_with_parent()
    settings = parse(ServeConfig, merge(dump(found.server), read_overrides(ServeConfig, rest)))
    _remark(found.remark)
    number = run_server(found.source, settings, model_name=parsed.name or found.source.name, announce=_say)
    return 128 + number if number else 0


def chat(words: Sequence[str]) -> int:
    """`modelwright chat`"""
    parser = _parser("chat", "Talk to a model in the terminal.")
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--int8", action="store_true", help="take the run's INT8 model")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=0.95, help="sample from the likeliest tokens of this weight")
    options = parser.parse_args(words)
    from modelwright.pipeline.models import find_model
    from modelwright.serve.terminal import chat as talk

    found = find_model(_run_or_folder(options.target), stage=options.stage, int8=options.int8)
    _remark(found.remark)
    _say(f"Model: {found.source.describe()}")
    talk(found.source.folder, temperature=options.temperature, top_p=options.top_p)
    return 0


def export(words: Sequence[str]) -> int:
    """`modelwright export`"""
    parser = _parser("export", "Write a run's model as a folder that `transformers` loads.")
    parser.usage = "modelwright export RUN --to hf [DEST] [--stage NAME] [--overwrite]"
    parser.add_argument("target", metavar="RUN", help="a run directory or its name")
    parser.add_argument("--to", nargs="+", required=True, metavar=("hf", "DEST"), help="format, and where to")
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--overwrite", action="store_true", help="replace DEST when it exists")
    options = parser.parse_args(words)
    if options.to[0] != "hf" or len(options.to) > 2:
        raise ConfigError(f"--to: {' '.join(options.to)!r} is not understood; write --to hf, or --to hf DEST")
    from modelwright.pipeline.models import export_hf, find_model
    from modelwright.recipes.load import find_run

    run = find_run(options.target)
    target = Path(options.to[1]) if len(options.to) == 2 else run.path / "hf"
    found = find_model(run.path, stage=options.stage)
    _remark(found.remark)
    folder = export_hf(found, target, overwrite=options.overwrite)
    print(f"Model: {found.source.describe()}", file=sys.stderr)
    print(folder)
    return 0


def report(words: Sequence[str]) -> int:
    """`modelwright report`"""
    parser = _parser("report", "Write a run's report.html again from what is in its folder.")
    parser.add_argument("target", metavar="RUN", help="a run directory or its name")
    options = parser.parse_args(words)
    from modelwright.pipeline.run import previous_config
    from modelwright.pipeline.stages.report import write_report
    from modelwright.recipes.load import find_run

    run = find_run(options.target)
    settings = previous_config(run)
    if settings is None:
        raise ConfigError(f"{run.path}: has no config.yaml; run it again")
    write_report(settings, run)
    print(run.report)
    return 0


def prove(words: Sequence[str]) -> int:
    """`modelwright prove`: a command of the package `modelwright-claims`, found by its entry point."""
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=COMMANDS_GROUP, name="prove"):
        return entry_point.load()(words)
    raise ConfigError(
        "prove: the claims are a package of their own, modelwright-claims, which is not installed; "
        "in a checkout: pip install -e claims"
    )


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"modelwright {name}", description=description)


def _run_or_folder(word: str) -> Path:
    """A run directory, a model folder, or the name of a run under runs/."""
    from modelwright.recipes.load import find_run

    return Path(word) if (Path(word) / "config.json").is_file() else find_run(word).path


def leave_with_parent() -> None:
    """Ask this process to stop as SIGTERM does once its parent is another one: a killed parent can tell nobody."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVING_S)
        os._exit(Stopped.exit_code)  # it waits for other processes in a call that no signal interrupts

    threading.Thread(target=watch, daemon=True).start()


def _remark(text: str) -> None:
    if text:
        print(f"modelwright: {text}", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, flush=True)
