"""Dotted overrides on the command line: `--a.b value`, `--a.b=value`, `--data.sources one two three`.

Turns words into a plain mapping for `core.config`. A word meant for a text field stays text (`--name 1e3`), everything
else is read as YAML reads it.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from modelwright.core.config import is_constant, parse_scalar, set_dotted
from modelwright.core.errors import ConfigError
from modelwright.core.suggest import nearest

OPTION_SIMILARITY = 0.85
"""Options are short words, so a name must resemble one more closely than a setting."""


def split_words(words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Split into the words before the first option and `(option, its values)` in order.

    A value is every word up to the next one that starts with `--`; after a bare `--` nothing is an option.
    """
    leading: list[str] = []
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            leading.append(word)
    return leading, options


def split_settings(
    words: Sequence[str], own: Sequence[str]
) -> tuple[list[str], list[str], list[tuple[str, list[str]]]]:
    """Split into the words before the first option, the options in `own` as words for a parser, and all other options,
    which are settings. `-h` becomes `--help`, which `own` should contain.
    """
    leading, options = split_words(words)
    spelled = [word for name, values in options if name in own for word in (f"--{name}", *values)]
    if "-h" in words:
        spelled.append("--help")
    return leading, spelled, [option for option in options if option[0] not in own]


def split_section(
    section: str, options: Sequence[tuple[str, list[str]]]
) -> tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]]:
    """The options of one section, without its name, and all others."""
    start = f"{section}."
    own = [(name.removeprefix(start), words) for name, words in options if name.startswith(start)]
    return own, [option for option in options if not option[0].startswith(start)]


def read_overrides(config: type, options: Sequence[tuple[str, list[str]]], own: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping that the options describe, for the dataclass `config`. An option without a value means `true`.

    own: options of the command itself. Raises `ConfigError` for a setting that does not exist; it names the nearest
    setting or option, if one is near.
    """
    data: dict[str, Any] = {}
    for dotted, words in options:
        dotted = dotted.replace("-", "_")
        hint = field_type(config, dotted, own)
        set_dotted(data, dotted, _value(hint, words, dotted), maxsplit=_num_groups(config, dotted))
    return data


def field_type(config: type, dotted: str, own: Sequence[str] = ()) -> Any:
    """The type hint of the field at a dotted path. Raises `ConfigError` as `read_overrides` does."""
    hint: Any = config
    for name in dotted.split(".", _num_groups(config, dotted)):
        hints = _hints(hint)
        if isinstance(hint, type) and name in hints:
            hint = hints[name]
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif hint is Any:
            continue  # a setting of another package, which checks it
        else:
            near = _nearest(config, dotted, own)
            raise ConfigError(f"--{dotted}: unknown setting{near and f'; did you mean --{near}?'}{_known(hint)}")
    return hint


def _num_groups(config: type, dotted: str) -> int:
    """How many dots of a path separate groups; those in the key of a mapping of numbers are a part of it, as in
    `clean.quality.limits.prose.max_digit_fraction`, and those below a mapping of anything are not, as in
    `training.techniques.NAME.SETTING`.
    """
    hint: Any = config
    names = dotted.split(".")
    for number, name in enumerate(names):
        if typing.get_origin(hint) is dict and typing.get_args(hint)[1] is not Any:
            return number
        hint = _hints(hint).get(name)
    return len(names) - 1


def _hints(config: Any) -> dict[str, Any]:
    """The types of a dataclass's settings by name; empty for anything else."""
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        return {}
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in dataclasses.fields(config) if not is_constant(field)}


def all_paths(config: type, prefix: str = "") -> Iterator[str]:
    """Every dotted path of a config dataclass, groups included."""
    for name, hint in _hints(config).items():
        yield prefix + name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from all_paths(hint, f"{prefix}{name}.")


def _known(group: Any) -> str:
    """Known names close to an unknown one, as text."""
    return f" (known there: {', '.join(typing.get_type_hints(group))})" if dataclasses.is_dataclass(group) else ""


def _nearest(config: type, dotted: str, own: Sequence[str]) -> str:
    """The option, or the setting, in the same group if that exists, that a name most resembles; "" for none."""
    if option := nearest(dotted.replace("_", "-"), own, similarity=OPTION_SIMILARITY):
        return option
    known = list(all_paths(config))
    group, _, last = dotted.rpartition(".")
    siblings = [path for path in known if path.startswith(f"{group}.")]
    by_last: dict[str, str] = {path.rpartition(".")[2]: path for path in reversed(siblings or known)}
    # names in one group resemble each other for the group's name alone
    return ("" if siblings else nearest(dotted, known)) or by_last.get(nearest(last, by_last), "")


def _value(hint: Any, words: Sequence[str], dotted: str) -> Any:
    if not words:
        if _is_text(hint) or _item(hint) is not None:
            raise ConfigError(f"--{dotted}: needs a value")
        return True
    item = _item(hint)
    if typing.get_origin(hint) is dict and words[0].startswith("{"):
        return parse_scalar(" ".join(words))  # braces that a shell has cut at their spaces
    if item is None:
        if len(words) > 1:
            spare = " ".join(words[1:])
            raise ConfigError(f"--{dotted}: takes one value; {spare!r} is one too many (the recipe comes first)")
        return _word(hint, words[0])
    if words[0].startswith("[") and words[-1].endswith("]"):  # as a configuration file has it, perhaps cut at spaces
        inner = " ".join(words)[1:-1].strip()
        words = [word.strip().strip("'\"") for word in inner.split(",")] if inner else []
    return [_word(item, word) for word in words]


def _word(hint: Any, word: str) -> Any:
    return word if _is_text(hint) else parse_scalar(word)


def _is_text(hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return all(isinstance(choice, str) for choice in typing.get_args(hint))
    return hint is str


def _item(hint: Any) -> Any:
    """The item type of a tuple field, `None` for a field with a single value."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        result = [_item(arg) for arg in typing.get_args(hint)]
        return next((item for item in result if item is not None), None)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
