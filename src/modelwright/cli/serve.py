"""`modelwright serve`: serves a model over HTTP. Also reads the model and the settings of a server from words."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.processes import leave_with_parent
from modelwright.core.config import ConfigError, read_overrides, require, split_settings

if TYPE_CHECKING:  # PyTorch takes seconds to load
    from modelwright.core.config_docs import Setting

STAGE_HELP = "the model of this training stage of the run (default: the last that has finished)"

MODEL_OPTIONS = ("stage", "int8", "served-model-name", "adapters", "backend")
"""Options of `add_model_options`."""


@dataclass(frozen=True)
class Serving:
    """source: a `ModelSource`; settings: a `ServeConfig`; requests: a `RequestsConfig`; remark: for the user, or ""."""

    source: Any
    settings: Any
    requests: Any
    model_name: str
    remark: str


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model, its adapters and its engine."""
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument("--stage", default="", help=STAGE_HELP)
    parser.add_argument("--int8", action="store_true", help="serve the run's quantized model")
    parser.add_argument(
        "--served-model-name", default="", metavar="NAME", help="the model's name for clients (default: the run's)"
    )
    parser.add_argument(
        "--adapters",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="LoRA adapters of the model, each a model for clients",
    )
    parser.add_argument(
        "--backend",
        default="modelwright",
        metavar="NAME",
        help="engine that computes the answers, with a format of its weights after a colon, as in openvino:q8_0; an "
        "unknown name or format lists those that exist (default: modelwright)",
    )


def setting_names() -> list[str]:
    """Dotted names of a server's settings."""
    return [setting.key for setting in _settings()]


def settings_help() -> str:
    """Lists a server's settings with their defaults, for the end of a command's help."""
    lines = textwrap.wrap(", ".join(f"--{one.key} ({one.default})" for one in _settings()), 116)
    return "\n".join(
        [
            "settings of the server, with their defaults (docs/config.md, sections serve and requests):",
            *(f"  {line}" for line in lines),
        ]
    )


def _settings() -> "list[Setting]":
    from modelwright.core.config_docs import settings_of
    from modelwright.serve.config import RequestsConfig, ServeConfig

    return [*settings_of(ServeConfig), *settings_of(RequestsConfig, "requests")]


def read_serving(
    parsed: argparse.Namespace, settings: Sequence[tuple[str, list[str]]], own_names: Sequence[str]
) -> Serving:
    """Reads the model that `parsed` names, with the settings of its run, overridden by those of the command line.
    own_names: options of the command itself. Raises `ConfigError` for a word of `--adapters` that is not NAME=FOLDER
    and for a name that comes twice.
    """
    from modelwright.core.config import dump, merge, parse
    from modelwright.pipeline.models import find_model
    from modelwright.recipes.load import find_target
    from modelwright.serve.config import RequestsConfig, ServeConfig

    result = find_model(find_target(parsed.target), stage=parsed.stage, int8=parsed.int8)
    start = "requests."
    kept = [(name.removeprefix(start), words) for name, words in settings if name.startswith(start)]
    rest = [option for option in settings if not option[0].startswith(start)]
    # The command line overrides the run's own settings.
    config = parse(ServeConfig, merge(dump(result.server), read_overrides(ServeConfig, rest, own_names)))
    adapters: dict[str, str] = {}
    for word in parsed.adapters:
        name, _, folder = word.partition("=")
        if not name or not folder:
            raise ConfigError(f"--adapters: {word!r} is not NAME=FOLDER, such as poet=runs/poet/sft/artifact/adapter")
        adapters[name] = folder
    if len(adapters) < len(parsed.adapters):
        names = ", ".join(word.partition("=")[0] for word in parsed.adapters)
        raise ConfigError(f"--adapters: the names must differ, got {names}")
    config = replace(config, adapters=adapters, backend=parsed.backend)
    requests = parse(RequestsConfig, merge(dump(result.requests), read_overrides(RequestsConfig, kept)), "requests")
    return Serving(result.source, config, requests, parsed.served_model_name or result.source.name, result.remark)


def show_remark(text: str) -> None:
    """Print a remark about the chosen model to the terminal; nothing for ""."""
    if text:
        print(f"modelwright: {text}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "serve",
        "Serve a model over HTTP as the OpenAI API does; SIGTERM or Ctrl-C drains and stops. Every setting of the "
        "server can be given by its name.",
        notes=settings_help(),
        example="modelwright serve runs/quickstart --port 8000 --engine.max_num_seqs 64",
        usage="modelwright serve RUN|MODEL_FOLDER [--stage NAME] [--int8] [--port N] [--host H] "
        "[--adapters NAME=FOLDER ...] [--mcp CONFIG] [--a.b VALUE ...]",
    )
    add_model_options(parser)
    parser.add_argument(
        "--mcp", default="", metavar="CONFIG", help="JSON file with MCP servers, whose tools the chat page offers"
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the process that started it is gone")
    return parser


def serve(words: Sequence[str]) -> int:
    own_names = (*MODEL_OPTIONS, "mcp", "exit-with-parent", "help")
    leading, own, rest = split_settings(words, own_names)
    parsed = parser().parse_args([*leading, *own])
    require({"serve": "serve"})
    from modelwright.pipeline.models import find_model
    from modelwright.recipes.load import find_target
    from modelwright.serve.load import ModelSource
    from modelwright.serve.server import run_server

    if parsed.exit_with_parent:
        leave_with_parent()
    serving = read_serving(parsed, rest, own_names)
    show_remark(serving.remark)

    def locate(path: str) -> ModelSource:
        """Finds the model of a reload: another run or folder, or the newest model of the run that is served."""
        stage = "" if path else parsed.stage
        return find_model(find_target(path or parsed.target), stage=stage, int8=parsed.int8).source

    number = run_server(
        serving.source,
        replace(serving.settings, mcp=parsed.mcp),
        model_name=serving.model_name,
        requests=serving.requests,
        announce=lambda line: print(line, flush=True),
        locate=locate,
    )
    return 128 + number if number else 0


COMMAND = Command(
    name="serve",
    run=serve,
    parser=parser,
    settings=setting_names,
    summary="serve a run's model over HTTP, as the OpenAI API does",
)
