"""Dotted overrides on the command line: `--a.b value`, `--a.b=value`, `--data.sources one two three`.

Turns words into a plain mapping for `core.config`. A word meant for a text field stays text (`--name 1e3`), everything
else is read as YAML reads it.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from modelwright.core.config import is_constant, parse_scalar, set_dotted
from modelwright.core.errors import ConfigError


@typing.runtime_checkable
class HasRenamed(Protocol):
    """A config that knows settings of earlier versions."""

    @classmethod
    def renamed(cls, key: str) -> str:
        """What became of a key, as text; "" for one that never existed."""
        ...


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


def read_overrides(config: type, options: Sequence[tuple[str, list[str]]]) -> dict[str, Any]:
    """The mapping that the options describe, for the dataclass `config`. An option without a value means `true`. Raises
    `ConfigError` for a setting that does not exist and names the nearest one.
    """
    data: dict[str, Any] = {}
    for dotted, words in options:
        dotted = dotted.replace("-", "_")
        hint = field_type(config, dotted)
        set_dotted(data, dotted, _value(hint, words, dotted), maxsplit=_num_groups(config, dotted))
    return data


def field_type(config: type, dotted: str) -> Any:
    """The type hint of the field at a dotted path. Raises `ConfigError` and names the nearest known path."""
    hint: Any = config
    for name in dotted.split(".", _num_groups(config, dotted)):
        hints = _hints(hint)
        if isinstance(hint, type) and name in hints:
            hint = hints[name]
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif issubclass(config, HasRenamed) and (renamed := config.renamed(dotted)):
            raise ConfigError(f"--{dotted}: {renamed}")
        else:
            raise ConfigError(f"--{dotted}: unknown setting; did you mean --{_nearest(config, dotted)}?{_known(hint)}")
    return hint


def _num_groups(config: type, dotted: str) -> int:
    """How many dots of a path separate groups; those in the key of a mapping are a part of it, as in
    `clean.quality.limits.prose.max_digit_fraction`.
    """
    hint: Any = config
    names = dotted.split(".")
    for number, name in enumerate(names):
        if typing.get_origin(hint) is dict:
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


def _nearest(config: type, dotted: str) -> str:
    known = list(all_paths(config))
    group = dotted.rpartition(".")[0] + "."
    known = [path for path in known if path.startswith(group)] or known
    by_last: dict[str, str] = {path.rpartition(".")[2]: path for path in reversed(known)}
    near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.75)
    if not near:
        last = difflib.get_close_matches(dotted.rpartition(".")[2], list(by_last), n=1, cutoff=0.75)
        near = [by_last[name] for name in last] or difflib.get_close_matches(dotted, known, n=1, cutoff=0.0)
    return near[0]


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
