"""`modelwright show`: examples as a model learns them, token by token."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelwright.cli.clean import setting_names
from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import read_overrides, split_settings

if TYPE_CHECKING:
    from modelwright.recipes.show import Shown

_FLAGS = ("rows", "html", "help")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "show",
        "Show what is learned: rendered examples with learned tokens in color and special tokens framed, their "
        "weights and truncation, the form of the records, and what cleaning changes. With DATA, its first records as "
        "the model's chat template renders them; without, the first packed rows of a run.",
        example="modelwright show models/SmolLM2-135M-Instruct support.jsonl --rows 3 --html examples.html",
        usage="modelwright show RUN|MODEL_FOLDER [DATA ...] [--rows N] [--html FILE] [--data.a VALUE ...]",
    )
    parser.add_argument("target", metavar="RUN|MODEL_FOLDER", help="a run directory, its name, or a model folder")
    parser.add_argument("data", metavar="DATA", nargs="*", help="examples in a form of data.sources (docs/data.md)")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="number of examples or rows; default: 3")
    parser.add_argument("--html", default="", metavar="FILE", help="write a page with the same examples, too")
    return parser


def show(words: Sequence[str]) -> int:
    leading, own, settings = split_settings(words, _FLAGS)
    options = parser().parse_args([*leading, *own])
    from modelwright.recipes.cleaning import CleanCommandConfig
    from modelwright.recipes.show import show as show_target

    sections = read_overrides(CleanCommandConfig, settings, _FLAGS)
    given = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    print_shown(show_target(options.target, options.data, rows=options.rows, html=options.html, **given))
    return 0


def print_shown(shown: "Shown") -> None:
    """Print examples, in color on a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(shown.rich(), soft_wrap=True)
    else:
        print(str(shown), end="")


COMMAND = Command(
    name="show",
    run=show,
    parser=parser,
    settings=setting_names,
    summary="show which tokens are learned from examples or rows",
)
