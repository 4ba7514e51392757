"""The smaller commands. Each parses its arguments, calls one function of the floors below and prints the result."""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.overrides import split_settings
from modelwright.cli.parsers import new_parser
from modelwright.cli.serving import MODEL_OPTIONS, STAGE_HELP, add_model_options, read_serving
from modelwright.core.errors import ConfigError, Stopped

LEAVING_S = 120
"""How long a process whose parent has gone may take to save or to finish answers."""

COMMANDS_GROUP = "modelwright.commands"
"""Entry points of other packages: functions that take a command's words and return its exit code. Their module has a
function `parser` that returns the command's options."""


def recipe_names() -> tuple[str, ...]:
    """The recipes, as targets of a command."""
    from modelwright.recipes.load import RECIPES

    return RECIPES


def recipes_parser() -> argparse.ArgumentParser:
    return new_parser("recipes", "List the recipes that `modelwright run` knows.", example="modelwright recipes")


def recipes(words: Sequence[str]) -> int:
    """`modelwright recipes`"""
    recipes_parser().parse_args(words)
    from modelwright.recipes.load import RECIPES, recipe_file

    for name in RECIPES:
        summary = recipe_file(name).read_text(encoding="utf-8").partition("\n#\n")[0].partition("\nname:")[0]
        print(f"{name:<12} {' '.join(line.removeprefix('#').strip() for line in summary.splitlines())}")
    return 0


def serve_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "serve",
        "Serve a model over HTTP as the OpenAI API does; SIGTERM or Ctrl-C drains and stops. Every setting of the "
        "server can be given by its name (docs/config.md, section serve; those of section requests as --requests.log).",
        example="modelwright serve runs/quickstart --port 8000 --engine.max_num_seqs 64",
        usage="modelwright serve RUN|MODEL_FOLDER [--stage NAME] [--int8] [--port N] [--host H] "
        "[--adapters NAME=FOLDER ...] [--a.b VALUE ...]",
    )
    add_model_options(parser)
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the process that started it is gone")
    return parser


def serve(words: Sequence[str]) -> int:
    """`modelwright serve`"""
    own_names = (*MODEL_OPTIONS, "exit-with-parent", "help")
    leading, own, rest = split_settings(words, own_names)
    parsed = serve_parser().parse_args([*leading, *own])
    from modelwright.pipeline.models import find_model
    from modelwright.recipes.load import find_target
    from modelwright.serve.load import ModelSource
    from modelwright.serve.server import run_server

    if parsed.exit_with_parent:
        leave_with_parent()
    serving = read_serving(parsed, rest, own_names)
    _remark(serving.remark)

    def locate(path: str) -> ModelSource:
        """For reloads: another run or folder, or the newest model of the run that is served."""
        stage = "" if path else parsed.stage
        return find_model(find_target(path or parsed.target), stage=stage, int8=parsed.int8).source

    number = run_server(
        serving.source,
        serving.settings,
        model_name=serving.model_name,
        requests=serving.requests,
        announce=_say,
        locate=locate,
    )
    return 128 + number if number else 0


def chat_parser() -> argparse.ArgumentParser:
    parser = new_parser("chat", "Talk to a model in the terminal.", example="modelwright chat runs/quickstart")
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--int8", action="store_true", help="take the run's INT8 model")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 (the likeliest token) to 2; default: 0.7")
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="sample from the likeliest tokens of this weight, at most 1; default: 0.95",
    )
    return parser


def chat(words: Sequence[str]) -> int:
    """`modelwright chat`"""
    options = chat_parser().parse_args(words)
    from modelwright.infer.sequence import SamplingParams
    from modelwright.pipeline.models import find_model
    from modelwright.recipes.load import find_target
    from modelwright.serve.terminal import chat as talk

    params = SamplingParams(temperature=options.temperature, top_p=options.top_p)
    result = find_model(find_target(options.target), stage=options.stage, int8=options.int8)
    _remark(result.remark)
    _say(f"Model: {result.source.describe()}")
    talk(result.source.folder, params)
    return 0


def export_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "export",
        "Write a model for other programs: as a folder that `transformers` loads (hf); as a GGUF file for llama.cpp, "
        "with a Modelfile for Ollama beside it (gguf); or as a folder with the model's graph for ONNX Runtime (onnx) "
        "or OpenVINO (openvino), in FP32 or with the integers of a quantized model.",
        example="modelwright export runs/quickstart --to gguf model.gguf --dtype q8_0",
        usage="modelwright export RUN --to hf [DEST] [--stage NAME] [--overwrite]\n"
        "       modelwright export RUN|MODEL_FOLDER --to gguf [DEST] [--dtype f16|q8_0|q4_0] [--stage NAME] "
        "[--overwrite]\n"
        "       modelwright export RUN|MODEL_FOLDER --to onnx|openvino [DEST] [--int8] [--stage NAME] [--overwrite]",
    )
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument(
        "--to", nargs="+", required=True, metavar=("hf|gguf|onnx|openvino", "DEST"), help="format, and where to"
    )
    parser.add_argument(
        "--dtype", choices=("f16", "q8_0", "q4_0"), default="f16", help="number format of a GGUF file (default: f16)"
    )
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--int8", action="store_true", help="take the run's INT8 model (onnx, openvino)")
    parser.add_argument("--overwrite", action="store_true", help="replace DEST when it exists")
    return parser


def export(words: Sequence[str]) -> int:
    """`modelwright export`"""
    options = export_parser().parse_args(words)
    kind, *rest = options.to
    from modelwright.pipeline.exports import EXPORTS, ExportOptions
    from modelwright.pipeline.models import find_model
    from modelwright.recipes.load import find_run, find_target

    if kind not in EXPORTS or len(rest) > 1:
        written, formats = " ".join(options.to), ", ".join(EXPORTS)
        raise ConfigError(f"--to: {written!r} is not understood; write one of {formats}, with or without DEST")
    chosen = EXPORTS[kind]
    if options.int8 and not chosen.takes_integers:
        raise ConfigError(f"--int8: {kind} has no form for these weights; export to onnx or openvino")
    path = find_run(options.target).path if chosen.needs_run else find_target(options.target)
    result = find_model(path, stage=options.stage, int8=options.int8)
    _remark(result.remark)
    settings = ExportOptions(gguf_format=options.dtype, overwrite=options.overwrite)
    written = chosen.write(result, Path(*rest) if rest else chosen.target(result, settings), settings)
    print(f"Model: {result.source.describe()}", file=sys.stderr)
    print(written)
    return 0


def report_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "report",
        "Write a run's report.html again from what is in its folder.",
        example="modelwright report runs/quickstart",
    )
    parser.add_argument("target", metavar="RUN", help="a run directory or its name")
    return parser


def report(words: Sequence[str]) -> int:
    """`modelwright report`"""
    options = report_parser().parse_args(words)
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


def prove_parser() -> argparse.ArgumentParser:
    """The parser in the module of the entry point; without options where the claims are not installed."""
    from importlib import import_module
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=COMMANDS_GROUP, name="prove"):
        return import_module(entry_point.module).parser()
    return new_parser("prove", "Measure the claims.", example="modelwright prove --list")


def prove(words: Sequence[str]) -> int:
    """`modelwright prove`: a command of the package `modelwright-claims`, found by its entry point."""
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=COMMANDS_GROUP, name="prove"):
        return entry_point.load()(words)
    raise ConfigError(
        "prove: the claims are a package of their own, modelwright-claims, which is not installed; "
        "in a checkout: pip install -e claims"
    )


def leave_with_parent() -> None:
    """Send SIGTERM to this process once its parent has changed, because a killed parent cannot notify anyone."""
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
