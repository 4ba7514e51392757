"""`modelwright recipes`: the named runs of the package."""

import argparse
from collections.abc import Sequence

from modelwright.cli.parsers import Command, new_parser


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes, as targets of a command."""
    from modelwright.recipes.load import RECIPES

    return tuple(RECIPES)


def parser() -> argparse.ArgumentParser:
    return new_parser("recipes", "List the recipes that `modelwright run` knows.", example="modelwright recipes")


def recipes(words: Sequence[str]) -> int:
    parser().parse_args(words)
    from modelwright.recipes.load import RECIPES

    for name, path in RECIPES.items():
        summary = path.read_text(encoding="utf-8").partition("\n#\n")[0].partition("\nname:")[0]
        print(f"{name:<12} {' '.join(line.removeprefix('#').strip() for line in summary.splitlines())}")
    return 0


COMMAND = Command(name="recipes", run=recipes, parser=parser, summary="list the recipes")
