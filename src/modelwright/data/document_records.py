"""Recognizes records that are documents, as cleaning writes them, among those that a user names."""

import json
from collections.abc import Mapping
from typing import Any, cast

from modelwright.data.document import KINDS, SPLITS
from modelwright.data.images.stored import KEY, is_stored_image


def with_meta(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record with the field `meta` as an object where it is the text of one, as in tables of documents, and without
    an open split.
    """
    meta = record.get("meta")
    if not isinstance(meta, str) or record.get("kind") not in KINDS:
        return record
    try:
        fields: Any = json.loads(meta)
    except ValueError:
        return record
    dropped = "split" if record.get("split") in (None, "open") else ""
    return {name: value for name, value in {**record, "meta": fields}.items() if name != dropped}


def is_document(record: Mapping[str, Any]) -> bool:
    """Whether a record is a document that cleaning wrote, with all its fields; an open split has none."""
    if not all(_is_text(record, name) for name in ("id", "text", "source")) or not isinstance(record.get("meta"), dict):
        return False
    if record.get("kind") not in KINDS:
        return False
    if "split" in record and record["split"] not in SPLITS:
        return False
    meta = record["meta"]
    if not has_types_of_document(meta):
        return False
    if record["kind"] == "image":
        return is_stored_image(meta.get(KEY))
    return record["kind"] != "qa" or "messages" in meta or ("question" in meta and "answer" in meta)


def has_types_of_document(meta: Mapping[str, Any]) -> bool:
    """Whether the fields that `Document` gives a meaning have its types."""
    if not all(isinstance(meta.get(name, ""), str) for name in ("title", "summary", "question", "answer")):
        return False
    if not isinstance(meta.get("desirable", True), bool):
        return False
    return all(_are_turns(meta[name]) for name in ("messages", "rejected") if name in meta)


def _are_turns(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(_is_turn(turn) for turn in cast(list[Any], value))


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, dict) or not _is_text(turn, "role") or not _is_text(turn, "content"):
        return False
    calls = turn.get("tool_calls", [])
    if not isinstance(calls, list):
        return False
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return all(isinstance(function, dict) and "arguments" in function for function in functions)


def _is_text(record: Mapping[str, Any], name: str) -> bool:
    return isinstance(record.get(name), str)
