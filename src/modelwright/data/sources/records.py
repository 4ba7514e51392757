"""Records that are documents of cleaning or answers that Modelwright gave, and the JSON Schema that a user names.

A model that learns from its own answers by accident gets worse with each generation (Shumailov et al. 2024, AI models
collapse when trained on recursively generated data). A JSON Schema (https://json-schema.org) may say what every record
must have. `forms.py` reads conversations.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from jsonschema import SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from modelwright.core.config import ConfigError
from modelwright.data.document import KINDS, SPLITS, WEIGHT
from modelwright.data.images.decode import KEY, is_stored_image

AUTHOR_FIELD, ANSWER_FIELD = "answer_by", "answer"
OWN_AUTHOR = "modelwright"

REMEDY = (
    "learn from its prompts with --data.record_type text --data.text_field prompt, or from the answers, too, with "
    "--data.own_answers train"
)
REMEDY_TEXT = "leave it out, or learn from it with --data.own_answers train"


def with_meta(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a document's record with `meta` as an object where a table has it as text, and without an open split."""
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
    """Returns True for a document that cleaning wrote, with all of its fields, except for an open split."""
    is_complete = all(isinstance(record.get(name), str) for name in ("id", "text", "source"))
    if not is_complete or not isinstance(record.get("meta"), dict):
        return False
    if record.get("kind") not in KINDS or ("split" in record and record["split"] not in SPLITS):
        return False
    meta = record["meta"]
    if not has_types_of_document(meta):
        return False
    if record["kind"] == "image":
        return is_stored_image(meta.get(KEY))
    return record["kind"] != "qa" or "messages" in meta or ("question" in meta and "answer" in meta)


def has_types_of_document(meta: Mapping[str, Any]) -> bool:
    """Returns True if the fields of `meta` that `Document` reads have the right types."""
    if not all(isinstance(meta.get(name, ""), str) for name in ("title", "summary", "question", "answer")):
        return False
    if not isinstance(meta.get("desirable", True), bool) or type(meta.get(WEIGHT, 1.0)) not in (int, float):
        return False
    if not isinstance(meta.get("chat_template_kwargs", {}), dict) or not isinstance(meta.get("tools", []), list):
        return False
    for name in ("messages", "rejected"):
        turns = meta.get(name)
        if name in meta and not (isinstance(turns, list) and turns and all(map(_is_turn, cast(list[Any], turns)))):
            return False
    return True


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("role", "content")):
        return False
    calls = turn.get("tool_calls", [])
    if not isinstance(turn.get("reasoning_content", ""), str) or not isinstance(turn.get("train", True), bool):
        return False
    if not isinstance(calls, list):
        return False
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return all(isinstance(function, dict) and "arguments" in function for function in functions)


def is_own(record: Mapping[str, Any]) -> bool:
    """Returns True if Modelwright wrote the answer of a record."""
    return record.get(AUTHOR_FIELD) == OWN_AUTHOR


class RecordSchema:
    """A JSON Schema read from a file."""

    def __init__(self, schema: Any, path: str) -> None:
        """path: the file's path, for errors. Raises `jsonschema.SchemaError` for a schema that is not valid."""
        self._path = path
        kind = validator_for(schema)
        kind.check_schema(schema)
        self._validator = kind(schema)

    @staticmethod
    @cache
    def read(path: str) -> "RecordSchema":
        """Reads the schema of a file. Raises `ConfigError` with the name of the file."""
        try:
            with open(path, encoding="utf-8") as file:
                return RecordSchema(json.load(file), path)
        except OSError as error:
            raise ConfigError(f"schema: {path}: cannot be read ({error.strerror}); give a JSON Schema file") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"schema: {path}: is not JSON ({error}); give a JSON Schema file") from None
        except SchemaError as error:
            raise ConfigError(f"schema: {path}: is not a JSON Schema ({error.message}); correct it") from None

    def problem(self, record: Mapping[str, Any]) -> str:
        """Returns the part of the schema that a record violates, "" for a valid one, without the record's values.

        Raises `ConfigError` for a schema with references or patterns that cannot be resolved.
        """
        try:
            error = best_match(self._validator.iter_errors(dict(record)))
        except (Unresolvable, re.error) as error:
            text = f"schema: {self._path}: cannot be applied ({error}); correct its references and patterns"
            raise ConfigError(text) from None
        if error is None:
            return ""
        field = ".".join(map(str, error.absolute_path)) or "the record"
        rule = f"{error.validator}: {error.validator_value!r}"
        # A rule may be a list of thousands of values.
        return f"{field} violates {rule[:200]}"
