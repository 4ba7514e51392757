"""From a body to a validated request, and refusals in plain words that name the field."""

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from modelwright.serve.contents import SHOWN_CHARACTERS, short
from modelwright.serve.errors import ApiError
from modelwright.serve.fields import RequestModel
from modelwright.serve.limits import Limits

R = TypeVar("R", bound=RequestModel)


def parse_request(kind: type[R], body: bytes, limits: Limits) -> R:
    """Parse a request from a body. Raises `ApiError` 400 that names the field and the remedy."""
    data = _load(body)
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    unknown = next((name for name in data if name not in kind.model_fields), None)
    if unknown is not None:
        raise _unknown_field(kind, unknown)
    kind.check_size(data, limits)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _refusal(first) from None


def _load(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
        data = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair can be escaped, and is no character that a tokenizer could read
            json.dumps(data, ensure_ascii=False).encode("utf-8")
        return data
    except json.JSONDecodeError as error:
        reason = str(error)
    except UnicodeEncodeError as error:
        reason = f"it has one half of a surrogate pair alone, {error.object[error.start]!r}"
    except (ValueError, RecursionError):
        reason = "it is not UTF-8 text or nested too deep"
    raise ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")


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
