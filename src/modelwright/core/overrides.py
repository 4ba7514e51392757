"""Dotted overrides on the command line: `--a.b value`, `--a.b=value`, `--data.sources one two three`.

Turns words into a plain mapping for `core.config`. The word for a text field stays text (`--name 1e3`), all others are
parsed as YAML.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelwright.core.config import ConfigError, is_constant, merge, nearest, parse_scalar, set_dotted

OPTION_SIMILARITY = 0.85
"""Least similarity of an option's name: higher than for settings, because options are short words."""


def split_words(words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Split into the words before the first option and `(option, its values)` in order. A value is every word up to the
    next one that starts with `--`; after a bare `--` nothing is an option.
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


def named_stages(text: str | None) -> tuple[str, ...]:
    """Returns the names in `--stages A,B`; empty if the option was not given."""
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if text is not None and not names:
        raise ConfigError("--stages: names no stage; write --stages clean,tokenize, or leave it out for all of them")
    return names


def read_overrides(config: type, options: Sequence[tuple[str, list[str]]], own: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the mapping that the options describe, for the dataclass `config`. An option without a value means
    `true`. own: options of the command itself. Raises `ConfigError` for a setting that does not exist, with the nearest
    setting or option, if one is near.
    """
    data: dict[str, Any] = {}
    for dotted, words in options:
        dotted = dotted.replace("-", "_")
        num_groups = _num_groups(config, dotted)
        hint: Any = config
        for name in dotted.split(".", num_groups):
            # Constants included: `parse` says of one that it is fixed, which is more than "unknown".
            if dataclasses.is_dataclass(hint) and name in (hints := typing.get_type_hints(hint)):
                hint = hints[name]
            elif typing.get_origin(hint) is dict:
                hint = typing.get_args(hint)[1]
            elif hint is not Any:  # a setting of another package, which checks it
                near = _nearest(config, dotted, own)
                text = f"; did you mean --{near}?" if near else ""
                if dataclasses.is_dataclass(hint):
                    text += f" (known there: {', '.join(_hints(hint))})"
                raise ConfigError(f"--{dotted}: unknown setting{text}", code="unknown")
        set_dotted(data, dotted, _value(hint, words, dotted), maxsplit=num_groups)
    return data


def nested_settings(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of the dataclass `config` as nested mappings. given: by dotted name, or as nested mappings."""
    data: dict[str, Any] = {}
    for dotted, value in given.items():
        one: dict[str, Any] = {}
        set_dotted(one, dotted, value, maxsplit=_num_groups(config, dotted))
        data = merge(data, one)
    return data


def _num_groups(config: type, dotted: str) -> int:
    """Number of a path's dots that separate groups. Dots in the key of a mapping of numbers belong to the key, as in
    `clean.quality.limits.prose.max_digit_fraction`; those below a mapping of anything separate groups, as in
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
    """Yields every dotted path of a config dataclass, groups included."""
    for name, hint in _hints(config).items():
        yield prefix + name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from all_paths(hint, f"{prefix}{name}.")


def _nearest(config: type, dotted: str, own: Sequence[str]) -> str:
    """Returns the most similar option, or the most similar setting, in the same group if that exists; "" for none."""
    if option := nearest(dotted.replace("_", "-"), own, similarity=OPTION_SIMILARITY):
        return option
    known = list(all_paths(config))
    group, _, last = dotted.rpartition(".")
    siblings = [path for path in known if path.startswith(f"{group}.")]
    by_last: dict[str, str] = {path.rpartition(".")[2]: path for path in reversed(siblings or known)}
    # Only last names are compared within a group: its full names resemble each other for the group's name alone.
    return ("" if siblings else nearest(dotted, known)) or by_last.get(nearest(last, by_last), "")


def _value(hint: Any, words: Sequence[str], dotted: str) -> Any:
    item = _item(hint)
    kind = hint if item is None else item
    is_text = kind is str
    if typing.get_origin(kind) is typing.Literal:
        is_text = all(isinstance(choice, str) for choice in typing.get_args(kind))
    if not words:
        if is_text or item is not None:
            raise ConfigError(f"--{dotted}: needs a value")
        return True
    if typing.get_origin(hint) is dict and words[0].startswith("{"):
        value = parse_scalar(" ".join(words))  # braces that a shell has cut at their spaces
        if not value:
            raise ConfigError(f"--{dotted}: {{}} changes nothing, because entries are added to those that are set")
        return value
    if item is None:
        if len(words) > 1:
            spare = " ".join(words[1:])
            raise ConfigError(f"--{dotted}: takes one value; {spare!r} is one too many (the recipe comes first)")
        return words[0] if is_text else parse_scalar(words[0])
    if words[0].startswith("[") and words[-1].endswith("]"):  # as a configuration file has it, perhaps cut at spaces
        inner = " ".join(words)[1:-1].strip()
        words = [word.strip().strip("'\"") for word in inner.split(",")] if inner else []
    return [word if is_text else parse_scalar(word) for word in words]


def _item(hint: Any) -> Any:
    """Item type of a tuple field, `None` for a field with a single value."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        result = [_item(arg) for arg in typing.get_args(hint)]
        return next((item for item in result if item is not None), None)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
