"""`modelwright config` and `modelwright explain`: a run's settings and what they mean."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelwright.cli.overrides import read_overrides, split_settings
from modelwright.cli.parsers import new_parser
from modelwright.core.errors import ConfigError
from modelwright.core.suggest import nearest

if TYPE_CHECKING:  # PyTorch takes seconds to load
    from modelwright.core.config_docs import Setting

_TABLE = ("| key | default | allowed | meaning |", "| --- | --- | --- | --- |")


def config_parser() -> argparse.ArgumentParser:
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
    """`modelwright config`"""
    from modelwright.core.config import compact_yaml, difference, dump
    from modelwright.core.config_docs import annotated_yaml, defaults_of
    from modelwright.pipeline.run_config import run_schema, training_names
    from modelwright.recipes.load import load

    leading, own, settings = split_settings(words, ("diff", "plain", "help"))
    flags = config_parser().parse_args([*leading, *own])
    if len(flags.target) != 1:
        raise ConfigError("config: name one recipe, YAML file or run directory (modelwright recipes lists the recipes)")
    schema = run_schema()
    plain = dump(load(flags.target[0], read_overrides(schema, settings)).config)
    if flags.diff:
        # a training stage's section lacks what it inherits, so it is compared key by key
        defaults, trainings = defaults_of(schema), [name for name in training_names() if name in plain]
        own = {name: difference(plain[name], defaults[name]) for name in trainings}
        changed = {**difference(plain, defaults, without=trainings), **own}
        plain = {name: changed[name] for name in plain if changed.get(name) not in (None, {})}
    if flags.plain or flags.diff:
        print(compact_yaml(plain), end="")
    else:
        print("\n".join(annotated_yaml(schema, plain)))
    return 0


def explain_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "explain",
        "Explain one setting, or all whose keys begin or end with KEY.",
        example="modelwright explain precision.policy",
    )
    parser.add_argument("key", metavar="KEY", help="a setting, such as pretrain.learning_rate or precision.policy")
    return parser


def explain(words: Sequence[str]) -> int:
    """`modelwright explain`"""
    key = explain_parser().parse_args(words).key.lstrip("-")
    known = run_settings()
    result = [one for one in known if f".{one.key}".endswith(f".{key}") or f"{one.key}.".startswith(f"{key}.")]
    result = result or [one for one in known if f".{key}." in f".{one.key}."]
    if not result:
        tails = {one.key.rpartition(".")[2]: one.key for one in reversed(known)}
        near = nearest(key.rpartition(".")[2], tails)
        hint = f"; did you mean {tails[near]}?" if near else " (modelwright config RECIPE lists them)"
        raise ConfigError(f"{key}: unknown setting{hint}")
    print("\n\n".join("\n".join(described(one)) for one in result))
    return 0


def run_settings() -> "list[Setting]":
    """All settings of a run, shared ones once: what training stages inherit is listed under `training`."""
    from modelwright.core.config_docs import settings_of
    from modelwright.pipeline.config import INHERITED
    from modelwright.pipeline.run_config import run_schema, training_names

    known, inherited = list(settings_of(run_schema())), tuple(f"{name}." for name in ("training", *INHERITED))
    shared = {one.key.removeprefix("training.") for one in known if one.key.startswith(inherited)}
    split = ((one, *one.key.partition(".")) for one in known)
    return [one for one, stage, _, key in split if not (stage in training_names() and key in shared)]


def listed_settings() -> "list[Setting]":
    """The settings that the page of settings lists: what the first training stage has, the others have too, and it is
    listed again only where their default is another one.
    """
    from modelwright.pipeline.run_config import training_names

    first, *others = training_names()
    defaults = {one.key.partition(".")[2]: one.default for one in run_settings() if one.key.startswith(f"{first}.")}
    split = ((one, *one.key.partition(".")) for one in run_settings())
    return [one for one, stage, _, key in split if not (stage in others and defaults.get(key) == one.default)]


def setting_names() -> list[str]:
    """The dotted name of every setting of a run, inherited ones included."""
    from modelwright.core.config_docs import settings_of
    from modelwright.pipeline.run_config import run_schema

    return [setting.key for setting in settings_of(run_schema())]


def described(setting: "Setting") -> list[str]:
    """Lines about one setting, for a terminal."""
    facts = {"default": setting.default, "allowed": setting.allowed, "unit": setting.unit}
    is_inherited = setting.key.startswith(("training.", "lora.", "energy."))
    inherits = "training stages inherit it and may set their own" if is_inherited else ""
    lines = [setting.key, f"  {setting.doc}"]
    return lines + [f"  {name}: {value}" for name, value in {**facts, "scope": inherits}.items() if value]


def markdown() -> str:
    """The page docs/config.md. What all training stages have is in one table."""
    from modelwright.pipeline.run_config import training_names

    trainings = training_names()
    lines = [
        "# Settings",
        "",
        f"Generated by `python -m modelwright.cli.config`; {len(run_settings())} settings. `modelwright config RECIPE` "
        "prints those of a run, `modelwright explain KEY` one of them.",
        "",
        f"{' and '.join(f'`{name}`' for name in trainings)} inherit every setting of `training`, `lora` and "
        "`energy`, and may set their own value: `--training.precision.policy int8` switches all of them to INT8, "
        f"`--{trainings[-1]}.precision.policy fp32` only one.",
        "",
        "The section of a stage has the stage's name. A run has the sections of its own stages only: one that only "
        "fine-tunes writes no section for pretraining. The section of a stage that a run does not have is checked and "
        "then ignored, with a note. A run that `--stages` began with a part of a recipe keeps the recipe's other "
        "sections for when their stages are added.",
    ]
    section = ""
    for setting in listed_settings():
        name = setting.key.partition(".")[0] if "." in setting.key else "run"
        if name != section:
            section = name
            lines += ["", f"## {_title(name)}", "", *_TABLE]
        cells = [f"`{setting.key}`", f"`{setting.default}`", setting.allowed, setting.doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _title(section: str) -> str:
    from modelwright.pipeline.run_config import training_names

    first, *others = training_names()
    if section in others:
        return f"{section}: what it has beside {first}'s settings"
    return f"{section}, and every other training stage" if section == first else section


if __name__ == "__main__":
    print(markdown(), end="")
