"""Reads files that somebody else may have made: nothing outside the folder, no device, no more than a limit, and what
is not valid JSON or YAML is empty. Texts of data and requests are shown shortened, with personal data covered.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, cast

import yaml

MOST_JSON_BYTES = 8_000_000
MOST_YAML_BYTES = 1_000_000


_PERSONAL = re.compile(r"[^\s@<>\"']{1,64}@[^\s@<>\"']{1,255}|(?<![\w.])\+?\d[\d ()/.-]{6,}\d(?![\w.])")


class OutsideError(OSError):
    """The path leads out of the folder, or is not a regular file."""


# Half of the time to read a file. A folder that becomes a link later is outside of itself, and is refused.
@lru_cache(maxsize=4096)
def _real_folder(folder: Path) -> str:
    return os.path.realpath(folder)


def open_inside(folder: Path, *parts: str) -> BinaryIO:
    """Opens a regular file below `folder` for reading. Raises `OutsideError` for anything else, and `OSError`."""
    path = folder.joinpath(*parts)
    try:
        real = os.path.realpath(path, strict=True)
    except (ValueError, RuntimeError) as error:  # a null byte; a loop of links
        raise OutsideError(f"{path}: {error}") from None
    if not real.startswith(_real_folder(folder) + os.sep):
        raise OutsideError(f"{path}: is outside of {folder}")
    # A pipe would block for ever without O_NONBLOCK; the last part was resolved, so it is no link any more.
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OutsideError(f"{path}: is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_text(folder: Path, *parts: str, most: int = MOST_JSON_BYTES) -> str:
    """Returns the file's text, "" if it cannot be read or has more than `most` bytes."""
    try:
        with open_inside(folder, *parts) as file:
            data = file.read(most + 1)
    except OSError:
        return ""
    return data.decode("utf-8", "replace") if len(data) <= most else ""


def read_tail(folder: Path, *parts: str, most: int = 64_000) -> str:
    """Returns the last whole lines of a file, at most `most` bytes; "" if it cannot be read."""
    try:
        with open_inside(folder, *parts) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError:
        return ""
    text = data.decode("utf-8", "replace")
    return text.partition("\n")[2] if size > most and "\n" in text else text


def read_json(folder: Path, *parts: str, most: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file, `{}` if the file is missing or damaged."""
    return as_object(parse_json(read_text(folder, *parts, most=most)))


def parse_json(text: str) -> Any:
    """Returns the value, `None` if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_lines(text: str) -> list[dict[str, Any]]:
    """Returns the objects among JSON lines."""
    values = (parse_json(line) for line in text.splitlines() if line.startswith("{"))
    return [value for value in values if isinstance(value, dict)]


def as_object(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def as_number(value: Any) -> float:
    """Returns a number of JSON, or one of the texts that stand for numbers that are not finite; NaN for the rest."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return float("nan")
    try:
        return float(value)
    except (ValueError, OverflowError):
        return float("nan")


@cache
def read_table(name: str) -> dict[str, Any]:
    """Returns a YAML file of the board itself, `{}` for a name without one."""
    path = files("modelwright_board") / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def flat_settings(text: str, *, most: int = 4000) -> dict[str, str]:
    """Returns the settings of a YAML text by dotted name; empty if it is not YAML. most: entries after which it stops,
    because a few lines of aliases can stand for billions.
    """
    result: dict[str, str] = {}
    if len(text) > MOST_YAML_BYTES:
        return result
    try:
        plain = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError):
        return result

    def walk(value: Any, path: str, depth: int) -> None:
        if len(result) >= most:
            return
        if isinstance(value, Mapping) and value and depth < 12:
            for key, one in cast(Mapping[Any, Any], value).items():
                walk(one, f"{path}.{key}" if path else str(key), depth + 1)
        elif isinstance(value, (list, Mapping)):
            items = cast("list[Any] | Mapping[Any, Any]", value)
            plain = isinstance(items, list) and all(isinstance(one, (str, int, float)) for one in items[:50])
            result[path] = ", ".join(map(str, items[:50])) if plain else f"{len(items)} entries" if items else "[]"
        else:
            result[path] = str(value)[:500]

    if isinstance(plain, Mapping):
        walk(plain, "", 0)
    return result


def masked(text: object, most: int = 400) -> str:
    """Returns the beginning of a text, in which addresses and long numbers are covered."""
    words = _PERSONAL.sub("▮▮▮", str(text)[: 4 * most])
    return words if len(words) <= most else words[: most - 3] + "..."
