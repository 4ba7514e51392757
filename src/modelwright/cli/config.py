"""`modelwright config`: prints a run's settings with their documentation; also writes the page docs/config.md."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelwright.cli.parsers import Command, new_parser
from modelwright.cli.recipes import recipe_names
from modelwright.core.errors import ConfigError
from modelwright.core.overrides import read_overrides, split_settings

if TYPE_CHECKING:  # PyTorch takes seconds to load
    from modelwright.core.config_docs import Setting

_TABLE = ("| key | default | allowed | meaning |", "| --- | --- | --- | --- |")


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "config",
        "Print a configuration as YAML, overrides applied, each setting under its documentation. It runs as it is.",
        example="modelwright config quickstart --diff > mine.yaml",
        usage="modelwright config RECIPE|CONFIG.yaml|RUN_DIR [--diff] [--plain] [--a.b VALUE ...]",
    )
    parser.add_argument("target", metavar="RECIPE|CONFIG.yaml|RUN_DIR", nargs="*", help="whose configuration to print")
    parser.add_argument("--diff", action="store_true", help="print only what differs from the defaults")
    parser.add_argument("--plain", action="store_true", help="print no documentation")
    return parser


def config(words: Sequence[str]) -> int:
    from modelwright.core.config import compact_yaml, difference, dump
    from modelwright.core.config_docs import annotated_yaml, defaults_of
    from modelwright.pipeline.run_config import run_schema, training_names
    from modelwright.recipes.load import load

    leading, own, settings = split_settings(words, ("diff", "plain", "help"))
    flags = parser().parse_args([*leading, *own])
    if len(flags.target) != 1:
        raise ConfigError("config: name one recipe, YAML file or run directory (modelwright recipes lists the recipes)")
    schema = run_schema()
    plain = dump(load(flags.target[0], read_overrides(schema, settings)).config)
    if flags.diff:
        # A training stage's section lacks what it inherits, so it is compared key by key.
        defaults, trainings = defaults_of(schema), [name for name in training_names() if name in plain]
        own = {name: difference(plain[name], defaults[name]) for name in trainings}
        changed = {**difference(plain, defaults, without=trainings), **own}
        plain = {name: changed[name] for name in plain if changed.get(name) not in (None, {})}
    if flags.plain or flags.diff:
        print(compact_yaml(plain), end="")
    else:
        print("\n".join(annotated_yaml(schema, plain)))
    return 0


def run_settings() -> "list[Setting]":
    """Lists all settings of a run, shared ones once: those that training stages inherit are under `training`."""
    from modelwright.core.config_docs import settings_of
    from modelwright.pipeline.config import INHERITED, SHARED
    from modelwright.pipeline.run_config import run_schema, training_names

    known, inherited = list(settings_of(run_schema())), tuple(f"{name}." for name in ("training", *INHERITED, *SHARED))
    shared = {one.key.removeprefix("training.") for one in known if one.key.startswith(inherited)}
    split = ((one, *one.key.partition(".")) for one in known)
    return [one for one, stage, _, key in split if not (stage in training_names() and key in shared)]


def listed_settings() -> "list[Setting]":
    """Lists the settings of the page docs/config.md: those that the first training stage shares with the others are
    listed again only where the default differs.
    """
    from modelwright.pipeline.run_config import training_names

    first, *others = training_names()
    defaults = {one.key.partition(".")[2]: one.default for one in run_settings() if one.key.startswith(f"{first}.")}
    split = ((one, *one.key.partition(".")) for one in run_settings())
    return [one for one, stage, _, key in split if not (stage in others and defaults.get(key) == one.default)]


def setting_names() -> list[str]:
    """Dotted names of all settings of a run, inherited ones included."""
    from modelwright.core.config_docs import settings_of
    from modelwright.pipeline.run_config import run_schema

    return [setting.key for setting in settings_of(run_schema())]


def markdown() -> str:
    """Returns the page docs/config.md. Settings that all training stages have are in one table."""
    from modelwright.pipeline.config import SHARED, inherited
    from modelwright.pipeline.run_config import training_names
    from modelwright.pipeline.stages.specs import known_stages

    first, *others = trainings = training_names()
    readers = {name: [one.name for one in known_stages() if one.objective and name in inherited(one)] for name in SHARED}
    of_some = [
        f"{' and '.join(f'`{stage}`' for stage in stages)} inherit `{name}` in the same way."
        for name, stages in readers.items()
    ]
    lines = [
        "# Settings",
        "",
        f"Generated by `python -m modelwright.cli.config`; {len(run_settings())} settings. `modelwright config RECIPE` "
        "prints those of a run, `modelwright explain KEY` one of them.",
        "",
        f"{' and '.join(f'`{name}`' for name in trainings)} inherit every setting of `training`, `lora`, `ewc` and "
        "`energy`, and may set their own value: `--training.precision.policy int8` switches all of them to INT8, "
        f"`--{trainings[-1]}.precision.policy fp32` only one. {' '.join(of_some)}",
        "",
        "The section of a stage has the stage's name. A run has the sections of its own stages only: one that only "
        "fine-tunes writes no section for pretraining. The section of a stage that a run does not have is checked and "
        "then ignored, with a note. A run that `--stages` began with a part of a recipe keeps the recipe's other "
        "sections for when their stages are added.",
    ]
    # Settings of one section are adjacent, so a new name begins a table.
    section = ""
    for setting in listed_settings():
        name = setting.key.partition(".")[0] if "." in setting.key else "run"
        if name != section:
            section = title = name
            if name == first:
                title = f"{name}, and every other training stage"
            elif name in others:
                title = f"{name}: what it has beside {first}'s settings"
            lines += ["", f"## {title}", "", *_TABLE]
        cells = [f"`{setting.key}`", f"`{setting.default}`", setting.allowed, setting.doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


COMMAND = Command(
    name="config",
    run=config,
    parser=parser,
    settings=setting_names,
    targets=recipe_names,
    summary="print the configuration of a recipe or a YAML file, with documentation",
)

if __name__ == "__main__":
    print(markdown(), end="")
