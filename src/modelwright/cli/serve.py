"""`modelwright serve`: serves a model over HTTP."""

import argparse
from collections.abc import Sequence

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.serving import (
    MODEL_OPTIONS,
    add_model_options,
    read_serving,
    setting_names,
    settings_help,
    show_remark,
)
from modelwright.cli.stopping import leave_with_parent
from modelwright.core.overrides import split_settings


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "serve",
        "Serve a model over HTTP as the OpenAI API does; SIGTERM or Ctrl-C drains and stops. Every setting of the "
        "server can be given by its name.",
        notes=settings_help(),
        example="modelwright serve runs/quickstart --port 8000 --engine.max_num_seqs 64",
        usage="modelwright serve RUN|MODEL_FOLDER [--stage NAME] [--int8] [--port N] [--host H] "
        "[--adapters NAME=FOLDER ...] [--a.b VALUE ...]",
    )
    add_model_options(parser)
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the process that started it is gone")
    return parser


def serve(words: Sequence[str]) -> int:
    own_names = (*MODEL_OPTIONS, "exit-with-parent", "help")
    leading, own, rest = split_settings(words, own_names)
    parsed = parser().parse_args([*leading, *own])
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
        serving.settings,
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
