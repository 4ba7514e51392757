"""Forms of the board's buttons. SCREEN.yaml lists the forms of a screen: a command line with a place for each field."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from modelwright.core.config import ConfigError
from modelwright_board.files import read_table
from modelwright_board.runs import shown_path

Values = Mapping[str, str]
_PLACE = re.compile(r"\{(\w+)\}(.*)")
_DATA_SUFFIX = re.compile(r"(\.(ya?ml|jsonl?|csv|tsv|txt|md|parquet|gz|zst))+$")


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a form.

    kind: text, number, check (the flag alone), words (split as a shell does), run (the name of a run below the board's
    folder), choice (one of the choices, in words), or map (a field for each of `roles`, together a JSON object).
    flag: option before the value; empty for a value by position. choices: the name of suggestions, or pairs of value
    and title. preset: value in a new form, "{run}" for the run that the page is about, "{port}" for one that no server
    has. fallback: name of a run if the field is empty, made of other fields.
    """

    name: str
    label: str
    kind: str = "text"
    flag: str = ""
    choices: str | Sequence[tuple[str, str]] = ""
    preset: str = ""
    hint: str = ""
    is_required: bool = False
    fallback: str = ""
    roles: Sequence[str] = ()

    def words(self, root: Path, values: Values) -> list[str]:
        """Returns the field's part of the command line. Raises `ConfigError`. root: folder of the runs."""
        value = values.get(self.name, "").strip()
        if self.kind == "map":
            roles = {role: text for role in self.roles if (text := values.get(f"{self.name}_{role}", "").strip())}
            value = json.dumps(roles) if roles else ""
        elif self.kind == "run":
            value = value or re.sub(r"\{(\w+)\}", lambda place: base_name(values.get(place[1], "")), self.fallback)
        elif self.kind == "choice" and not isinstance(self.choices, str):
            known = [word for word, _ in self.choices]
            value = value or known[0]
            if value not in known:
                raise ConfigError(f"{self.label}: must be one of {', '.join(known)}, got {value!r}")
        if not value:
            if self.is_required:
                raise ConfigError(f"{self.label}: fill in this field")
            return []
        if self.kind == "check":
            return [self.flag]
        if self.kind == "run":
            if value.startswith((".", "-")) or "/" in value or "\\" in value:
                raise ConfigError(f"{self.label}: must be a plain name")
            value = shown_path(root / value)
        flag = [self.flag] if self.flag else []
        if self.kind != "words" and (self.kind != "choice" or isinstance(self.choices, str)):
            return [*flag, value]
        try:
            return [*flag, *shlex.split(value)]
        except ValueError as error:
            raise ConfigError(f"{self.label}: {error}") from None


def base_name(value: str) -> str:
    """Returns the last part of the first path in a field, without the suffix of a data file."""
    return _DATA_SUFFIX.sub("", Path((value.split() or [""])[0]).name)


@dataclass(frozen=True, kw_only=True)
class Action:
    """A button with its form. command: words, in which {FIELD} stands for a field's part and {own} for the board's
    folder. run: the field that names the run on which the command works. needs: the command must be installed.
    """

    name: str
    title: str
    command: str
    fields: Mapping[str, Field]
    button: str = "Start"
    text: str = ""
    needs: str = ""
    run: str = ""

    def words(self, root: Path, own: Path, values: Values) -> list[str]:
        """Returns the command line without the program's name. Raises `ConfigError` for values that make none."""
        result: list[str] = []
        for word in self.command.split():
            place = _PLACE.fullmatch(word)
            if place is None:
                result.append(word)
            elif place[1] == "own":
                result.append(shown_path(own) + place[2])
            else:
                part = self.fields[place[1]].words(root, values)
                result += [*part[:-1], part[-1] + place[2]] if part else []
        return result

    def run_name(self, root: Path, values: Values) -> str:
        """Returns the name of the run on which the command works, "" for a dry run and for a command without one."""
        if not self.run or values.get("dry"):
            return ""
        return Path(self.fields[self.run].words(root, values)[-1]).name


@cache
def forms_of(screen: str) -> Sequence[Action]:
    """Returns the forms of a screen in the order of its file. A field without a description of its own is the shared
    one of that name.
    """
    shared = read_table("fields")
    actions: list[Action] = []
    for name, plain in read_table(f"screens/{screen}").items():
        fields = {key: Field(name=key, **(shared.get(key, {}) | (own or {}))) for key, own in plain["fields"].items()}
        actions.append(Action(name=name, **{**plain, "fields": fields}))
    return actions
