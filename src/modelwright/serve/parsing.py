"""From a body to a validated request, and refusals in plain words that name the field."""

import json
import time
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from modelwright.serve.body_shape import body_shape, lone_surrogate
from modelwright.serve.contents import SHOWN_CHARACTERS, short
from modelwright.serve.errors import ApiError
from modelwright.serve.fields import RequestModel
from modelwright.serve.limits import SPARE_ENTRIES, Limits

R = TypeVar("R", bound=RequestModel)

UNCOUNTED_BYTES = 2 * SPARE_ENTRIES
"""Bodies up to this size cannot have too many entries: each takes a byte and a comma."""

MAX_DEPTH = 1000
"""Lists and objects inside each other in a large body: Python's recursion limit, unless someone has changed it."""

PAUSE_NUMBERS = 4096
"""Numbers of a large body that are parsed without a pause, in less than 1 ms."""

PAUSE_S = 0.001
"""Long enough for a waiting thread to take the interpreter's lock."""


def parse_request(kind: type[R], body: bytes, limits: Limits) -> R:
    """Parse a request from a body. Raises `ApiError` 400 that names the field and the remedy."""
    data = _load(body, limits)
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    unknown = next((name for name, value in data.items() if name not in kind.model_fields and value is not None), None)
    if unknown is not None:
        raise _unknown_field(kind, unknown)
    kind.check_size(data, limits)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _refusal(first) from None


def _load(body: bytes, limits: Limits) -> Any:
    try:
        text = body.decode("utf-8")
        data = json.loads(text) if len(body) <= UNCOUNTED_BYTES else _load_large(text, body, limits)
    except json.JSONDecodeError as error:
        raise _not_json(str(error)) from None
    except UnicodeDecodeError:
        raise _not_json("it is not UTF-8 text") from None
    except RecursionError:
        raise _not_json("it is nested too deep") from None
    except ValueError:  # Python converts no integers of more than 4300 digits
        raise _not_json("it has an integer with too many digits") from None
    if "\\u" in text and (half := lone_surrogate(body)):
        raise _not_json(f"it has one half of a surrogate pair alone, {half!r}")
    return data


def _load_large(text: str, body: bytes, limits: Limits) -> Any:
    """`json.loads` of what `limits` allow, with pauses in which other threads get the interpreter's lock."""
    shape = body_shape(body)
    if shape.depth > MAX_DEPTH:
        raise RecursionError
    try:
        limits.check_shape(shape)
    except ApiError:
        if shape.is_closed:
            raise
        raise _not_json("a string, list or object in it has no end") from None
    pauses = _Pauses()
    return json.loads(text, parse_int=pauses.parse_int, parse_float=pauses.parse_float)


class _Pauses:
    """Converts numbers as `json` does and pauses now and then."""

    def __init__(self) -> None:
        self._num_parsed = 0

    def parse_int(self, text: str) -> int:
        self._count()
        return int(text)

    def parse_float(self, text: str) -> float:
        self._count()
        return float(text)

    def _count(self) -> None:
        self._num_parsed += 1
        if self._num_parsed % PAUSE_NUMBERS == 0:
            time.sleep(PAUSE_S)


def _not_json(reason: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")


def _unknown_field(kind: type[BaseModel], name: str) -> ApiError:
    known = ", ".join(sorted(kind.model_fields))
    shown = short(name)
    return ApiError(400, f"Unknown field {shown!r}. Known fields: {known}.", param=shown, code="unknown_parameter")


def _refusal(problem: Any) -> ApiError:
    path = [str(part) for part in problem["loc"]]
    if not path:
        return ApiError(400, f"The request contradicts itself: {_reason(problem)}.", code="invalid_value")
    name = path[0]
    where = ".".join(part for part in path if part.isdigit() or part.isidentifier())
    if problem["type"] == "missing":
        return ApiError(400, f"Missing required field {where!r}.", param=name, code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field {where!r}; remove it.", param=name, code="unknown_parameter")
    return ApiError(400, f"Invalid value for {where!r}: {_reason(problem)}.", param=name, code="invalid_value")


def _reason(problem: Any) -> str:
    """What is wrong, and the value if it is a short one."""
    value = problem["input"]
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "too_short":
        return "must not be empty"
    expected = "must be an object" if problem["type"] == "model_type" else problem["msg"]
    expected = (
        expected.replace("Input should be a valid ", "must be a ")
        .replace("must be a integer", "must be an integer")
        .replace("Input should be ", "must be ")
    )
    is_scalar = value is None or isinstance(value, (bool, int, float, str))
    return f"{expected}, got {json.dumps(value)}" if is_scalar and len(str(value)) <= SHOWN_CHARACTERS else expected
