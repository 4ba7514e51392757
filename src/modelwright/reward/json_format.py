"""Reward 1 for an answer that is JSON, and valid under a JSON Schema if there is one, else 0."""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from modelwright.core.config import ConfigError
from modelwright.reward.pattern import TIMEOUT_S, compile_pattern
from modelwright.reward.reward import Reward, Sample, Score

_FENCED = re.compile(r"^[ \t]*```(?:json)?[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class JsonConfig:
    """JSON, alone or in a code block."""

    schema: str = ""
    """Path of a JSON Schema; empty for none."""
    schema_field: str = ""
    """The record's field with the JSON Schema of its answer, an object or its text; empty for none."""

    def __post_init__(self) -> None:
        if self.schema and self.schema_field:
            raise ConfigError("schema_field: remove it, or remove schema; an answer has one schema")

    def build(self, name: str) -> Reward:
        if not self.schema:
            return Json(name, self.schema_field, None)
        try:
            validator = _validator(Path(self.schema).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"schema: {self.schema} cannot be read as a JSON Schema ({error})") from None
        return Json(name, self.schema_field, validator)


@dataclass(frozen=True)
class Json:
    name: str
    schema_field: str
    validator: Validator | None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        validator = self.validator
        if self.schema_field:
            schema = sample.fields.get(self.schema_field)
            try:
                validator = _validator(schema if isinstance(schema, str) else json.dumps(schema))
            except ValueError as error:
                return Score.failure("bad_schema", f"the field {self.schema_field!r} is not a JSON Schema: {error}")
        try:
            # `NaN` and `Infinity`, which Python's parser accepts, are not JSON (RFC 8259, section 6).
            blocks = _FENCED.findall(sample.answer)
            text = blocks[0] if len(blocks) == 1 else sample.answer
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return Score(0.0, "not_json")
        try:
            is_valid = validator is None or validator.is_valid(value)
        except RecursionError:  # an answer that is nested more deeply than a recursive schema can follow
            return Score(0.0, "invalid")
        except TimeoutError:
            return Score.failure("pattern_timeout", "a pattern of the schema backtracked for too long")
        except Unresolvable as error:
            return Score.failure("bad_schema", f"the schema refers to {error}, which is not in it")
        return Score(float(is_valid), "valid" if is_valid else "invalid")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@functools.lru_cache(maxsize=256)  # a group of answers to one prompt has one schema, and its check takes milliseconds
def _validator(text: str) -> Validator:
    """Raises `ValueError` for a text that is not a JSON Schema."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError(f"expected an object, got {type(schema).__name__}")
    draft = validator_for(schema, default=Draft202012Validator)
    try:
        draft.check_schema(schema)
    except SchemaError as error:
        raise ValueError(error.message) from None
    # The empty registry keeps a `$ref` from fetching a URL.
    return extend(draft, {"pattern": _pattern})(schema, registry=Registry())


def _pattern(validator: Validator, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Matches the keyword `pattern` with a timeout, because the text to match is the model's."""
    if isinstance(instance, str) and not compile_pattern(pattern).search(instance, timeout=TIMEOUT_S):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")
