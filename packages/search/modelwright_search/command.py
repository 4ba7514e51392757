"""`modelwright search`: a model's shape, or hyperparameters, under budgets of latency, parameters and training cost."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from modelwright.cli.config import setting_names
from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.recipes import recipe_names
from modelwright.core.config import ConfigError, read_overrides, split_settings
from modelwright.core.config_docs import field_docs
from modelwright.recipes.display import choose_display
from modelwright_search.config import SearchConfig, option

FIELDS = dataclasses.fields(SearchConfig)
FLAGS = (*(option(field.name)[2:] for field in FIELDS), "run-dir", "restart", "help")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "search",
        "Search depth, width, heads, kind of attention, gate and feed-forward width, or learning rate, batch and "
        "weight decay, for the lowest held-out loss within a latency measured on the serving engine and a number of "
        "parameters. Every strategy has the same budget of training. Writes a journal, a report and the winner's "
        "settings into <run>/search; the same command continues a search that was stopped or killed.",
        example="modelwright search quickstart --budget 8 --steps 200",
        usage="modelwright search RECIPE|CONFIG.yaml|RUN_DIR [--OPTION VALUE ...] [--a.b VALUE ...]",
    )
    parser.add_argument("target", metavar="RECIPE|CONFIG.yaml|RUN_DIR")
    for field in FIELDS:
        default, text = field.default, field_docs(SearchConfig)[field.name]
        is_list = isinstance(default, tuple)
        parser.add_argument(
            option(field.name), dest=field.name, type=str if is_list else type(default), default=default,
            nargs="+" if is_list else None, metavar="NAME" if is_list or isinstance(default, str) else "N",
            help=f"{text.rstrip('.')} (default: {' '.join(default) if isinstance(default, tuple) else default})",
        )  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", default="", help="directory of the run (default: runs/<name>)")
    parser.add_argument("--restart", action="store_true", help="discard existing trials")
    return parser


def search(words: Sequence[str]) -> int:
    """`modelwright search`"""
    leading, own, settings = split_settings(words, FLAGS)
    if not leading and "--help" not in own:
        raise ConfigError("search: name a recipe, a YAML file or a run directory first")
    options = parser().parse_args([*leading, *own])
    from modelwright.pipeline.run_config import run_schema
    from modelwright.recipes.load import load
    from modelwright_search.result import as_text
    from modelwright_search.run import search as search_run

    values = {field.name: getattr(options, field.name) for field in FIELDS}
    values["strategies"] = tuple(name for word in options.strategies for name in word.split(",") if name)
    request = load(options.target, read_overrides(run_schema(), settings, FLAGS), options.run_dir)
    display = choose_display(sys.stderr)
    try:
        result = search_run(
            request.config, request.run, SearchConfig(**values), words=words, progress=display, restart=options.restart
        )
    finally:
        display.end()
    print(as_text(result, request.run.path / "search"), end="")
    return 0


COMMAND = Command(
    name="search",
    run=search,
    parser=parser,
    settings=setting_names,
    targets=recipe_names,
    summary="search a model's shape, or hyperparameters, under budgets",
    is_resumable=True,
)
