"""The model and the settings of a server, from the words after `modelwright serve`."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modelwright.core.errors import ConfigError
from modelwright.core.overrides import read_overrides

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
    parser.add_argument("--int8", action="store_true", help="serve the run's INT8 model")
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
