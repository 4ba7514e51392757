"""Registries: a file of a folder that says what the fields of its data files mean.

`dataset_info.json` is that of LLaMA-Factory (its data/README.md); `datasets.yaml` has the same entries. An entry names
a file (`file_name`), its `formatting` ("alpaca", "sharegpt" or "openai"), the `columns` by their meaning, the `tags` of
the turns, and whether it holds pairs of answers (`ranking`). Columns that an entry does not name keep the names that
the format has by default. `weight`, of ours, is how many times each epoch has the records of the file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

import fsspec
import yaml

from modelwright.core.config import DataError, did_you_mean
from modelwright.data.sources.fields import Fields

NAMES = ("dataset_info.json", "datasets.yaml")
_KEYS = ("file_name", "formatting", "ranking", "columns", "tags", "weight")
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_UNUSED = ("subset", "split", "folder", "num_samples")
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_SHAREGPT = {"messages": "conversations"}
_RANKING = {"chosen": "chosen", "rejected": "rejected"}
_COLUMNS = (*_ALPACA, *_SHAREGPT, *_RANKING, "history", "system", "tools", "kto_tag")
_OURS = {**_ALPACA, **_SHAREGPT}
"""Field of our forms by the registry's name of a column; the others have the same name."""
_MEDIA = ("images", "videos", "audios")
_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_OPENAI_TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "observation_tag": "tool", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_ROLES = {
    "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "function_tag": "function_call",
    "system_tag": "system",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """What a registry says of one file. columns: the file's own name by that of our forms; tags: names of the fields
    and roles of turns; is_listed: the names of columns that the registry itself states.
    """

    name: str
    registry: str
    file_name: str
    columns: Mapping[str, str]
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    stated: frozenset[str] = frozenset()
    weight: float = 1.0

    def fields(self, record: Mapping[str, Any], *, ignored: Sequence[str] = ()) -> Fields:
        """Returns a record under the names of our forms; columns that the entry does not name are left over. Raises
        `ValueError` for one that lacks a column which the registry states."""
        own = set(self.columns.values())
        if missing := [one for one in sorted(self.stated) if one not in record]:
            raise ValueError(f"lacks the field {missing[0]!r}, which {self.registry} names for {self.name!r}")
        mapped = {ours: self._turns(record[theirs]) for ours, theirs in self.columns.items() if theirs in record}
        rest = {name: value for name, value in record.items() if name not in own}
        return Fields(mapped, names=self.columns, rest=rest, ignored=ignored, original=record)

    def _turns(self, value: Any) -> Any:
        """Renames the fields and roles of turns; other values stay."""
        if not self.tags:
            return value
        if isinstance(value, list) and all(isinstance(one, Mapping) for one in cast(list[Any], value)):
            return [self._turns(one) for one in cast(list[Any], value)]
        if not isinstance(value, Mapping):
            return value
        turn = dict(cast(Mapping[str, Any], value))
        role, content = self.tags["role_tag"], self.tags["content_tag"]
        if role not in turn:
            return turn
        roles = {self.tags[tag]: ours for tag, ours in _ROLES.items()}
        said = turn.pop(role)
        # An OpenAI file has its roles by their own names, those of calls included.
        result = {"role": roles.get(said, said), **({"content": turn.pop(content)} if content in turn else {})}
        return result | turn


def entries_of(filesystem: fsspec.AbstractFileSystem, folder: str, shown: str) -> tuple[dict[str, Entry], list[str]]:
    """Returns the entries of a folder's registries by the file that they describe, and remarks on those without one.

    shown: the folder's name for messages. Raises `DataError` for a registry that cannot be read, with the entry.
    """
    entries: dict[str, Entry] = {}
    left_out: list[str] = []
    for name in NAMES:
        path = f"{folder.rstrip('/')}/{name}"
        if not filesystem.isfile(path):
            continue
        where = f"{shown.rstrip('/')}/{name}" if shown else name
        content = _read(filesystem, path, where)
        named = cast(dict[Any, Any], content) if isinstance(content, dict) else {}
        # A folder of the library `datasets` has a file of this name, too, which describes columns by their types.
        if name == NAMES[0] and not any(
            isinstance(one, dict) and not {"file_name", *_ELSEWHERE}.isdisjoint(one) for one in named.values()
        ):
            continue
        if not isinstance(content, dict):
            raise DataError(f"{where}: is not a mapping of data sets; write NAME: {{file_name: FILE}} for each")
        for key, value in named.items():
            entry = _entry(str(key), value, where)
            if entry is None:
                left_out.append(f"{where}: {key}")
            elif entry.file_name in entries:
                left_out.append(f"{where}: {key} (a second entry for {entry.file_name})")
            else:
                entries[entry.file_name] = entry
    return entries, left_out


def _read(filesystem: fsspec.AbstractFileSystem, path: str, where: str) -> Any:
    try:
        with filesystem.open(path, "rb") as file:
            text = cast(bytes, file.read()).decode("utf-8-sig")
        return json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{where}: cannot be read ({str(error).splitlines()[0]}); correct it or remove it") from None


def _entry(name: str, value: Any, where: str) -> Entry | None:
    """Returns an entry; None for one whose data are elsewhere."""

    def refuse(problem: str, remedy: str) -> DataError:
        return DataError(f"{where}: the entry {name!r} {problem}; {remedy}")

    if not isinstance(value, dict):
        raise refuse("is not a mapping", "write {file_name: FILE, columns: {...}}")
    entry = cast(dict[str, Any], value)
    if "file_name" not in entry:
        if not {*_ELSEWHERE}.isdisjoint(entry):
            return None
        raise refuse("names no file", "add file_name")
    for key in entry:
        if key not in (*_KEYS, *_ELSEWHERE):
            known = "which is not understood here" if key in _UNUSED else "which no registry has"
            raise refuse(f"has the key {key!r}, {known}{did_you_mean(key, _KEYS)}", "remove it")
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not 0 < weight <= 100:
        raise refuse(f"has the weight {weight!r}", "give the times that an epoch has its records, above 0, at most 100")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise refuse(f"has the formatting {formatting!r}", "use alpaca, sharegpt or openai")
    is_alpaca, is_ranking = formatting == "alpaca", bool(entry.get("ranking", False))
    given, tags = entry.get("columns") or {}, entry.get("tags") or {}
    for key, part in (("columns", given), ("tags", tags)):
        if not isinstance(part, dict) or not all(isinstance(one, str) for one in cast(dict[Any, Any], part).values()):
            raise refuse(f"has {key} that are not names", f"write {key}: {{NAME: NAME}}")
    for column in given:
        if column in _MEDIA:
            raise refuse(
                f"has a column of {column}, which a registry cannot bring", "remove it, or see docs/multimodal.md"
            )
        if column not in _COLUMNS:
            raise refuse(f"has the column {column!r}{did_you_mean(column, _COLUMNS)}", f"use {', '.join(_COLUMNS)}")
    for tag in tags:
        if tag not in _TAGS:
            raise refuse(f"has the tag {tag!r}{did_you_mean(tag, tuple(_TAGS))}", f"use {', '.join(_TAGS)}")
    columns: dict[str, str] = {**(_ALPACA if is_alpaca else _SHAREGPT), **(_RANKING if is_ranking else {}), **given}
    if is_ranking and is_alpaca and "response" not in given:
        columns.pop("response")  # the answers are the chosen and the rejected one
    if not is_ranking and not {"chosen", "rejected"}.isdisjoint(given):
        raise refuse("names chosen and rejected without ranking", "add ranking: true")
    names = {_OURS.get(ours, ours): theirs for ours, theirs in columns.items()}
    # Only these must be in every record: a system turn, a history or an input may be absent.
    needed = {"prompt", "response", "messages", "chosen", "rejected", "kto_tag"}
    stated = frozenset(theirs for ours, theirs in given.items() if ours in needed)
    all_tags = {} if is_alpaca else {**(_OPENAI_TAGS if formatting == "openai" else _TAGS), **tags}
    file_name = str(PurePosixPath(entry["file_name"]))
    return Entry(name, where, file_name, names, all_tags, stated, float(weight))
