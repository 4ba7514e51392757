"""`modelwright explain`: explains the meaning of a setting."""

import argparse
from collections.abc import Sequence

from modelwright.cli.config import run_settings, setting_names
from modelwright.cli.parsers import Command, new_parser
from modelwright.core.config import ConfigError, nearest


def parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "explain",
        "Explain one setting, or all whose keys begin or end with KEY.",
        example="modelwright explain precision.policy",
    )
    parser.add_argument("key", metavar="KEY", help="a setting, such as pretrain.learning_rate or precision.policy")
    return parser


def explain(words: Sequence[str]) -> int:
    key = parser().parse_args(words).key.lstrip("-")
    known = run_settings()
    result = [one for one in known if f".{one.key}".endswith(f".{key}") or f"{one.key}.".startswith(f"{key}.")]
    # Only if nothing begins or ends with the key: groups in the middle, such as `precision`.
    result = result or [one for one in known if f".{key}." in f".{one.key}."]
    if not result:
        # Reversed, so that of equal last names the first setting is proposed.
        tails = {one.key.rpartition(".")[2]: one.key for one in reversed(known)}
        near = nearest(key.rpartition(".")[2], tails)
        hint = f"; did you mean {tails[near]}?" if near else " (modelwright config RECIPE lists them)"
        raise ConfigError(f"{key}: unknown setting{hint}")
    texts: list[str] = []
    for one in result:
        is_inherited = one.key.startswith(("training.", "lora.", "energy."))
        scope = "training stages inherit it and may set their own" if is_inherited else ""
        facts = {"default": one.default, "allowed": one.allowed, "unit": one.unit, "scope": scope}
        lines = [one.key, f"  {one.doc}", *(f"  {name}: {value}" for name, value in facts.items() if value)]
        texts.append("\n".join(lines))
    print("\n\n".join(texts))
    return 0


COMMAND = Command(
    name="explain",
    run=explain,
    parser=parser,
    targets=setting_names,
    summary="explain a setting: its meaning, default and allowed values",
)
