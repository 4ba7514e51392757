"""Validation of records against a JSON Schema (https://json-schema.org)."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jsonschema import SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from modelwright.core.errors import ConfigError


class RecordSchema:
    """A JSON Schema read from a file."""

    def __init__(self, schema: Any, path: str) -> None:
        """path: of the file, for errors. Raises `jsonschema.SchemaError` for a schema that is not valid."""
        self._path = path
        kind = validator_for(schema)
        kind.check_schema(schema)
        self._validator = kind(schema)

    @staticmethod
    @cache
    def read(path: str) -> "RecordSchema":
        """Read the schema of a file. Raises `ConfigError` that names the file."""
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
        """Which part of the schema a record violates, "" for a valid one; the record's values are not repeated.

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
        return f"{field} violates {rule[:200]}"
