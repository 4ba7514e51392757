"""`modelwright lr-find`: proposes a peak learning rate for a recipe by a short sweep over rates."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from modelwright.cli.config import setting_names
from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.recipes import recipe_names
from modelwright.core.config import ConfigError, read_overrides, split_settings
from modelwright.recipes.display import shown_progress

_FLAGS = ("min-lr", "max-lr", "steps", "run-dir", "out", "help")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "lr-find",
        "Begin the run's first training while the learning rate climbs by equal factors, until the loss diverges, and "
        "propose a peak rate (Smith 2017). Uses the run's packed rows if they exist, else makes some; never writes "
        "into the run's own folder.",
        example="modelwright lr-find quickstart --min-lr 1e-5 --max-lr 0.1",
        usage="modelwright lr-find RECIPE|CONFIG.yaml|RUN_DIR [--min-lr RATE] [--max-lr RATE] [--steps N] [--out DIR] "
        "[--a.b VALUE ...]",
    )
    parser.add_argument("target", metavar="RECIPE|CONFIG.yaml|RUN_DIR")
    parser.add_argument("--min-lr", type=float, default=1e-6, metavar="RATE", help="first rate (default: 1e-6)")
    parser.add_argument("--max-lr", type=float, default=1.0, metavar="RATE", help="last rate (default: 1)")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="steps from one to the other (150)")
    parser.add_argument("--run-dir", metavar="DIR", default="", help="folder of the run (default: runs/<name>)")
    parser.add_argument(
        "--out", metavar="DIR", default="", help="folder for chart and figures (default: <run>-lr-find)"
    )
    return parser


def lr_find(words: Sequence[str]) -> int:
    leading, own, settings = split_settings(words, _FLAGS)
    if not leading and "--help" not in own:
        raise ConfigError("lr-find: name a recipe, a YAML file or a run directory first")
    options = parser().parse_args([*leading, *own])
    from modelwright.pipeline.lr_find import RangeConfig, range_test
    from modelwright.pipeline.run_config import run_schema
    from modelwright.recipes.load import load

    test = RangeConfig(min_lr=options.min_lr, max_lr=options.max_lr, num_steps=options.steps)
    request = load(options.target, read_overrides(run_schema(), settings, _FLAGS), options.run_dir)
    folder = Path(options.out) if options.out else request.run.path.with_name(f"{request.run.path.name}-lr-find")
    # The sweep trains into its folder, and the run itself must not change.
    if folder.resolve() == request.run.path.resolve():
        raise ConfigError(
            f"--out: {folder} is the run's own folder, which the test does not change; choose another one"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out: {folder} is a file; choose a folder")
    with shown_progress() as display:
        result = range_test(request.config, request.run, folder, test, words=["lr-find", *words], progress=display)
    print(f"proposed peak  {result.proposal:.3g}   (a tenth of {result.lowest:.3g}, where the loss was lowest)")
    print(f"steepest fall  {result.steepest:.3g}")
    print(f"configured     {request.config.first_training.learning_rate:.3g}")
    print(f"chart          {folder / 'lr-find.html'}")
    return 0


COMMAND = Command(
    name="lr-find",
    run=lr_find,
    parser=parser,
    settings=setting_names,
    targets=recipe_names,
    summary="propose a peak learning rate by a short sweep over rates",
)
