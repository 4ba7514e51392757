"""`modelwright search`: a model's shape, or hyperparameters, under budgets of latency, parameters and training cost."""

import argparse
import sys
from collections.abc import Sequence

from modelwright.cli.config import setting_names
from modelwright.cli.display import choose_display
from modelwright.cli.overrides import read_overrides, split_settings
from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.recipes import recipe_names
from modelwright.core.errors import ConfigError

_FLAGS = (
    "budget", "steps", "max-latency-ms", "max-parameters", "streams", "space", "strategies", "repetitions", "run-dir",
    "restart", "help",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "search",
        "Search depth, width, heads, kind of attention, gate and feed-forward width, or learning rate, batch and "
        "weight decay, for the lowest held-out loss within a latency measured on the serving engine and a number of "
        "parameters. Every strategy has the same budget of training. Writes a journal, a report and the winner's "
        "settings into <run>/search; the same command goes on with a search that was stopped or killed.",
        example="modelwright search quickstart --budget 8 --steps 200",
        usage="modelwright search RECIPE|CONFIG.yaml|RUN_DIR [--budget N] [--steps N] [--max-latency-ms MS] "
        "[--max-parameters N] [--streams N] [--space NAME|FILE.yaml] [--strategies NAME ...] [--repetitions N] "
        "[--run-dir DIR] [--restart] [--a.b VALUE ...]",
    )
    parser.add_argument("target", metavar="RECIPE|CONFIG.yaml|RUN_DIR")
    parser.add_argument(
        "--budget", type=float, default=8.0, metavar="N",
        help="training cost of each strategy, in trainings of the run's own model for --steps updates (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=200, metavar="N", help="updates of a whole training, at the run's batch (200)"
    )
    parser.add_argument(
        "--max-latency-ms", type=float, default=0.0, metavar="MS", help="for a decoded token (default: the run's own)"
    )
    parser.add_argument("--max-parameters", type=int, default=0, metavar="N", help="default: those of the run's own")
    parser.add_argument(
        "--streams", type=int, default=1, metavar="N", help="answers decoded at once for the latency (default: 1)"
    )
    parser.add_argument(
        "--space", default="architecture", metavar="NAME|FILE.yaml",
        help="architecture (the default), hyperparameters, or a YAML file with other values on the axes of one of them",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", nargs="+", metavar="NAME", help="default: tpe random halving scaled, without scaled for "
        "hyperparameters; docs/search.md lists all",
    )  # fmt: skip
    parser.add_argument(
        "--repetitions", type=int, default=1, metavar="N",
        help="trainings with other seeds of each strategy's best, to choose the winner by (default: 1)",
    )  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", default="", help="where the run lies (default: runs/<name>)")
    parser.add_argument("--restart", action="store_true", help="throw away the trials that are there")
    return parser


def search(words: Sequence[str]) -> int:
    """`modelwright search`"""
    leading, own, settings = split_settings(words, _FLAGS)
    if not leading and "--help" not in own:
        raise ConfigError("search: name a recipe, a YAML file or a run directory first")
    options = parser().parse_args([*leading, *own])
    from modelwright.pipeline.run_config import run_schema
    from modelwright.recipes.load import load
    from modelwright.search.report import as_text
    from modelwright.search.run import SearchConfig
    from modelwright.search.run import search as search_run

    names = [name for word in options.strategies or () for name in word.split(",") if name]
    wish = SearchConfig(
        budget=options.budget,
        num_steps=options.steps,
        max_latency_ms=options.max_latency_ms,
        max_parameters=options.max_parameters,
        num_streams=options.streams,
        space=options.space,
        strategies=tuple(names),
        num_repetitions=options.repetitions,
    )
    request = load(options.target, read_overrides(run_schema(), settings, _FLAGS), options.run_dir)
    display = choose_display(sys.stderr)
    try:
        result = search_run(request.config, request.run, wish, words=words, progress=display, restart=options.restart)
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
