"""Configuration: frozen dataclasses to and from plain mappings, YAML files and dotted overrides, and the errors that
say what a user must change: one sentence that names the problem and the remedy. The command line prints the
message of a `ModelwrightError` without a traceback; anything else is a bug and keeps its traceback.

A config is a frozen keyword-only dataclass next to the class that it configures; it checks its own values in
`__post_init__`. This module turns mappings into such dataclasses and back.

Optional libraries come with extras: a module of an extra is imported where it is used, never at the top of a module
that the core loads, and `require` names those that are not installed. pyproject.toml has the versions. Extras that a
single file needs (`gguf`, `otel`) are named in that file.

Numbers as people write them: `2M`, `1.5K`, `64Ki`, `180MiB`, `9e14`, `10TFLOP/s`. The prefixes K, M, G and T are powers
of 1,000, as in the SI, and Ki, Mi, Gi and Ti powers of 1,024. Case does not matter.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
import signal
import types
import typing
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import yaml


class ModelwrightError(Exception):
    """Something a user did or a machine refused; the text says what to do about it."""

    exit_code = 2


class ConfigError(ModelwrightError, ValueError):
    """A configuration value is unknown, of the wrong type or out of range; the text starts with its path.

    code: a stable word for programs: `unknown` (no such setting), `missing`, `type`, `choice`, else `invalid`.
    """

    def __init__(self, text: str, *, code: str = "invalid") -> None:
        super().__init__(text)
        self.code = code

    @property
    def key(self) -> str:
        """Setting, option or file that the text is about; "" if it names none."""
        name, colon, _ = str(self).partition(": ")
        return name.removeprefix("--") if colon and " " not in name else ""


class DataError(ModelwrightError, ValueError):
    """Input data cannot be read; the text names the file and, where there is one, the line."""


class ModelError(ModelwrightError, ValueError):
    """A model folder cannot be loaded: unsupported architecture, missing tensors, wrong shapes."""


class Stopped(ModelwrightError):
    """The process was asked to stop by a signal (SIGTERM unless told otherwise); finished work stays."""

    exit_code = 128 + signal.SIGTERM

    def __init__(self, text: str, number: int = signal.SIGTERM) -> None:
        super().__init__(text)
        self.exit_code = 128 + number


STOPPING = (Stopped, KeyboardInterrupt, SystemExit)
"""Exceptions that end work on request: `Stopped` in training; elsewhere, Ctrl-C and SIGTERM."""


@contextmanager
def prefix_errors(section: str) -> Generator[None]:
    """Convert a `ConfigError` about a field into one about that field of `section`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{section}.{error}", code=error.code) from None


_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"(\d+\.?\d*(?:e[+-]?\d{1,3})?) ?([kmgt]i?|)((?:b|flop)?(?:/s)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """Number of `parse_quantity`. value: exact, with its prefix applied; unit: "", "b", "flop", or one of them per
    second ("b/s", "/s"); is_bare: true for a plain number, without prefix and unit.
    """

    value: Fraction
    unit: str
    is_bare: bool


def parse_quantity(text: str) -> Quantity | None:
    """Parse `text`; `None` if it is not such a number. Negative numbers are not accepted."""
    matched = _QUANTITY.fullmatch(text.strip())
    if matched is None:
        return None
    number, prefix, unit = (group.lower() for group in matched.groups())
    return Quantity(Fraction(number) * _PREFIXES[prefix], unit, not prefix and not unit)


def parse_count(text: str) -> int | None:
    """Parse a whole number without a unit (`2M`, `65_536`, `65536`); `None` for anything else."""
    quantity = parse_quantity(text.replace("_", ""))
    if quantity is None or quantity.unit or quantity.value.denominator != 1:
        return None
    return int(quantity.value)


C = TypeVar("C")
T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: `3e-4` is a number, not a string."""


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def constant(default: T) -> T:
    """A dataclass field that Python code can replace, for tests and experiments, but that is not a setting. `parse`
    rejects it and `dump` omits it. Use it for thresholds that no user has a reason to change.
    """
    return dataclasses.field(default=default, metadata={"constant": True})


def is_constant(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("constant"))


def only_for(setting: str, *values: object) -> Mapping[str, Any]:
    """Metadata of a dataclass field that has an effect only while another field of the same config, `setting`, has one
    of these values, or, without values, a value other than 0, false or empty.
    """
    return {"only_for": (setting, values)}


_WORDS_FOR_NONE = ("[]", "", "none", "off", "false")
"""Words that users write for an empty list; YAML reads `off` as false."""


def word_for_none() -> Mapping[str, Any]:
    """Metadata of a dataclass field with a list that words such as `none` and `off` leave empty."""
    return {"word_for_none": True}


def if_missing(remedy: str) -> Mapping[str, Any]:
    """Metadata of a dataclass field without a default: a remedy for the error about a missing value."""
    return {"if_missing": remedy}


def unused_settings(config: Any, path: str = "") -> list[str]:
    """Lists the changed settings that have an effect only with a choice that was not made (`only_for`), each with the
    choice that it needs.
    """
    unused: list[str] = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), _join(path, field.name)
        setting, values = field.metadata.get("only_for", ("", ()))
        chosen = getattr(config, setting) if setting else True
        if chosen not in values if values else not chosen:
            default = field.default if field.default is not dataclasses.MISSING else value
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if value != default:
                unused.append(f"{name} (needs {' '.join([setting, ' or '.join(map(str, values))]).strip()})")
        elif dataclasses.is_dataclass(value):
            unused += unused_settings(value, name)
    return unused


@typing.runtime_checkable
class HasPlainForm(Protocol):
    """A config whose plain data differs from its fields, such as one with sections that inherit from another."""

    def plain(self) -> dict[str, Any]:
        """Returns the settings as dicts, lists and scalars, without inherited ones."""
        ...


def parse(cls: type[C], data: Any, path: str = "", *, constants: bool = False) -> C:
    """Build the config dataclass `cls` from a plain mapping. constants: accept fields that are not settings, too.
    Otherwise such a field is accepted with its own value only, so that a run's file can still be read after a setting
    became a constant. Raises `ConfigError` that starts with the dotted path of the field: unknown key (naming the
    nearest known one), missing key, wrong type, or any error of the dataclass's own `__post_init__`.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or cls.__name__}: expected a mapping, got {data!r}", code="type")
    hints = typing.get_type_hints(cls)
    settings = cast(Mapping[Any, Any], data)
    known = dataclasses.fields(cls)  # type: ignore[arg-type]
    fields = {field.name: field for field in known if constants or not is_constant(field)}
    fixed = {field.name: field.default for field in known if field.name not in fields}
    settings = {key: value for key, value in settings.items() if key not in fixed or value != fixed[key]}
    for key in settings:
        if key in fixed:
            value = f" at {fixed[key]}" if isinstance(fixed[key], (bool, int, float, str)) else ""
            text = f"is fixed{value} and cannot be set; leave it out"
            raise ConfigError(f"{_join(path, str(key))}: {text}", code="fixed")
        if key not in fields:
            guess = did_you_mean(str(key), list(fields))
            raise ConfigError(
                f"{_join(path, str(key))}: unknown setting{guess} (known here: {', '.join(fields)})", code="unknown"
            )
    values: dict[str, Any] = {}
    for name in [name for name in fields if name in settings]:
        value: Any = settings[name]
        # `none` alone and a list with the only entry `none` both mean an empty list, if the field takes such words.
        entries: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
        word = entries[0] if len(entries) == 1 else ()
        is_none = word is None or (isinstance(word, (str, bool)) and str(word).lower() in _WORDS_FOR_NONE)
        if fields[name].metadata.get("word_for_none") and is_none:
            entries = []
            value = entries
        values[name] = _convert(hints[name], value, _join(path, name), constants)
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in values and not has_default:
            remedy = field.metadata.get("if_missing", "")
            raise ConfigError(
                f"{_join(path, name)}: is required and lacks a default{remedy and '; '}{remedy}", code="missing"
            )
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}.{error}" if path else str(error), code=error.code) from None


def dump(config: Any, *, constants: bool = False) -> Any:
    """Returns a config as plain data (dicts, lists, scalars); `parse(type(config), dump(config)) == config` except for
    a `HasPlainForm`. constants: include fields that are not settings.
    """
    if isinstance(config, HasPlainForm):
        return config.plain()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = [field for field in dataclasses.fields(config) if constants or not is_constant(field)]
        return {field.name: dump(getattr(config, field.name), constants=constants) for field in fields}
    if isinstance(config, Mapping):
        return {str(key): dump(value, constants=constants) for key, value in cast(Mapping[Any, Any], config).items()}
    if isinstance(config, (tuple, list)):
        return [dump(value, constants=constants) for value in cast(Sequence[Any], config)]
    if isinstance(config, Path):
        return str(config)
    return config


def set_dotted(data: dict[str, Any], dotted: str, value: Any, *, maxsplit: int = -1) -> None:
    """Set `data["a"]["b"] = value` for `dotted == "a.b"`, creating the mappings in between. maxsplit: number of dots to
    split at, so that the last name may contain dots.
    """
    *parents, last = dotted.split(".", maxsplit)
    for parent in parents:
        group: Any = data.setdefault(parent, {})
        if not isinstance(group, dict):
            raise ConfigError(f"{dotted}: {parent} is a value, not a group of settings")
        data = cast(dict[str, Any], group)
    data[last] = value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key, at all depths; other values in `over` replace those in `base`."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], cast(Mapping[str, Any], value)) if both else value
    return merged


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of each entry that is not itself a mapping."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def difference(config: Mapping[str, Any], base: Mapping[str, Any], *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the keys of `config` that `base` lacks or has with other values: `merge(base, difference(config, base))`
    gives `config` if it has all keys of `base`. without: keys of the top level to leave out.
    """
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in without or (key in base and base[key] == value):
            continue
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        changed[key] = difference(cast(Mapping[str, Any], value), base[key]) if both else value
    return changed


def parse_scalar(text: str) -> Any:
    """Parse a command-line word as YAML: `3e-4` a float, `true` a bool, `[1, 2]` a list, `a/b` a string."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def load_yaml(path: Path | str) -> dict[str, Any]:
    """Read a YAML mapping. Raises `ConfigError` with file and line if it is unreadable, malformed or not a mapping."""
    try:
        data: Any = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply for a configuration") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are not UTF-8, dates that do not exist
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: is not valid YAML ({getattr(error, 'problem', error)})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings at the top level")
    return cast(dict[str, Any], data)


class _ListsInLine(yaml.SafeDumper):
    """Writes lists of plain values on one line."""


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    is_plain = not any(isinstance(value, (dict, list)) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_plain)


_ListsInLine.add_representer(list, _represent_list)


def compact_yaml(plain: Mapping[str, Any]) -> str:
    """Format a plain mapping as YAML for reading, with lists of plain values on one line."""
    return yaml.dump(dict(plain), Dumper=_ListsInLine, sort_keys=False, allow_unicode=True, width=120)


def digest(value: Any) -> str:
    """Returns a stable SHA-256 of a config, constants included, or of plain data, as 64 hex digits."""
    # Sorted keys and constants included: the same settings give the same digest, whatever the order of the fields.
    text = json.dumps(dump(value, constants=True), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _convert(hint: Any, value: Any, path: str, constants: bool) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors: list[ConfigError] = []
        for arg in args:
            if arg is not type(None):
                try:
                    return _convert(arg, value, path, constants)
                except ConfigError as error:
                    errors.append(error)
        raise errors[-1]
    if origin is typing.Literal:
        if not any(value == one and type(value) is type(one) for one in args):  # in Python 1 == True
            known = ", ".join(str(one) if one != "" else "'' (nothing)" for one in args)
            raise ConfigError(f"{path}: {value!r} is not one of {known}", code="choice")
        return value
    if origin is tuple:
        items = cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else [value]
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(args[0], item, f"{path}[{i}]", constants) for i, item in enumerate(items))
        if len(items) != len(args):
            raise ConfigError(f"{path}: expected {len(args)} values, got {len(items)}")
        pairs = enumerate(zip(args, items, strict=True))
        return tuple(_convert(arg, item, f"{path}[{i}]", constants) for i, (arg, item) in pairs)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: expected a mapping, got {value!r}", code="type")
        entries = cast(Mapping[Any, Any], value).items()
        return {str(key): _convert(args[1], item, f"{path}.{key}", constants) for key, item in entries}
    if dataclasses.is_dataclass(hint):
        cls = cast(type[Any], hint)
        return value if isinstance(value, cls) else parse(cls, value, path, constants=constants)
    return _convert_scalar(hint, value, path)


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # YAML reads `1e6` as a float; fields that count accept it if it is whole.
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is int and isinstance(value, str):
        # `2M` means 2,000,000; fields that count bytes take `180MiB`, too. A bare number as text stays an error.
        quantity = parse_quantity(value)
        if quantity is not None and not quantity.is_bare:
            counts_bytes = "bytes" in path.rpartition(".")[2]
            if quantity.unit and not (quantity.unit == "b" and counts_bytes):
                raise ConfigError(
                    f"{path}: {value!r} has a unit that this field does not take; write 2000000, 2M or 2Mi"
                )
            if quantity.value.denominator != 1:
                raise ConfigError(f"{path}: {value!r} is not a whole number")
            return int(quantity.value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{path}: expected {hint.__name__}, got {value!r}", code="type")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: must be a finite number, got {value}")
    return value


SIMILARITY = 0.65
"""Least ratio of `difflib` at which a name is taken for a misspelling of another: that of `rum` and `run` is 0.67."""


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def nearest(word: str, known: Iterable[str], *, similarity: float = SIMILARITY) -> str:
    """Returns the known word with `word` as initials (`lr` for `learning_rate`), or the most similar; "" for none."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=similarity)
    # Initials first: short words resemble many names, but few names have them as initials.
    by_initials = [name for name in known if "_" in name and "".join(part[:1] for part in name.split("_")) == word]
    return [*by_initials, *near, ""][0]


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Returns `; did you mean NAME?` with the nearest known word, or ""."""
    near = nearest(word, known)
    return f"; did you mean {prefix + near!r}?" if near else ""


def hub_hint(word: str) -> str:
    """Returns a hint for the name of a model on a hub (`owner/name`): nothing is downloaded, and how to get a folder;
    "" for other words.
    """
    owner = word.partition("/")[0]
    if not _HUB_NAME.fullmatch(word) or os.path.isdir(owner) or owner in (".", ".."):
        return ""
    return (
        f"; if this is the name of a model on a hub: nothing is downloaded here, so fetch its folder first "
        f"(hf download {word} --local-dir FOLDER, on a machine with a connection) and name FOLDER"
    )


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a 63-bit seed for the stream called `names`: stable across machines, processes and Python versions."""
    # `hash` differs between processes; 63 bits, because torch's and NumPy's seeds are signed 64-bit numbers.
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


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


EXTRA_MODULES: Mapping[str, tuple[str, ...]] = {
    "clean": ("resiliparse", "fastwarc", "rensa", "phonenumbers", "stdnum", "py3langid", "sklearn", "scipy"),
    "completion": ("shtab",),
    "hub": ("huggingface_hub",),
    "images": ("PIL", "sklearn", "scipy"),
    "report": ("matplotlib",),
    "serve": ("starlette", "uvicorn", "pydantic", "prometheus_client", "openai", "scipy"),
    "tensorboard": ("tensorboardX",),
}


def is_installed(extra: str) -> bool:
    """Returns True if every module of the extra can be found. Imports none of them."""
    return all(find_spec(module) is not None for module in EXTRA_MODULES[extra])


def install_line(*extras: str) -> str:
    """Returns the command that installs the extras."""
    return f"pip install 'modelwright[{','.join(dict.fromkeys(extras))}]'"


def require(needs: Mapping[str, str]) -> None:
    """Raises one `ConfigError` for all extras that are not installed. needs: the extra, by the setting, command or file
    that needs it.
    """
    lacking = {name: extra for name, extra in needs.items() if not is_installed(extra)}
    if lacking:
        first, *others = lacking
        also = f" (as do {', '.join(others)})" if len(others) > 1 else f" (as does {others[0]})" if others else ""
        text = f"{first}: needs packages that are not installed{also}"
        raise ConfigError(f"{text}; {install_line(*sorted(lacking.values()))}", code="missing")
