"""Reads bodies into validated requests and their token ids, with errors in plain words that name the field.

Bodies are read up to a size and within a time. Large ones are parsed in another thread, so that streams continue.
"""

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from modelwright.serve.account.monitoring import ID_SCOPE, with_fields
from modelwright.serve.api.fields import SHOWN_CHARACTERS, RequestModel, short
from modelwright.serve.errors import ApiError, log
from modelwright.serve.limits import SPARE_ENTRIES, Limits, body_shape, lone_surrogate
from modelwright.serve.service import Lease, service_of

T = TypeVar("T")
R = TypeVar("R", bound=RequestModel)

INLINE_BODY_BYTES = 16_384
"""Largest body that is parsed in the event loop: it takes less time than a switch to another thread and back."""
DISCARD_PAUSE_S = 0.01
"""Pause between two reads (of up to 256 KiB each) of a body that is too large."""
UNCOUNTED_BYTES = 2 * SPARE_ENTRIES
"""Largest body that cannot have too many entries: each takes a byte and a comma."""
MAX_DEPTH = 1000
"""Deepest nesting of lists and objects in a large body: Python's default recursion limit."""
PAUSE_NUMBERS = 4096
"""Numbers of a large body that are parsed without a pause, in less than 1 ms."""
PAUSE_S = 0.001
"""Long enough for a waiting thread to take the interpreter's lock."""


def parse_request(kind: type[R], body: bytes, limits: Limits) -> R:
    """Parses a request from a body. Raises `ApiError` 400 that names the field and the remedy."""
    data = _load(body, limits)
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    # before pydantic, which would report wrong values of known fields first
    extra = [name for name, value in data.items() if name not in kind.model_fields and value is not None]
    for name, neutral in kind.NEUTRAL_VALUES.items():
        if name in extra and data.pop(name) != neutral:
            text = f"{name} is not supported by this server, which takes only {json.dumps(neutral)}; remove it."
            raise ApiError(400, text, param=name, code="unsupported_parameter")
    extra = [name for name in extra if name in data]
    unknown = next((name for name in extra if name not in kind.HARMLESS_FIELDS), None)
    if unknown is not None:
        known, shown = ", ".join(sorted(kind.model_fields)), short(unknown)
        text = f"Unknown field {shown!r}. Known fields: {known}."
        raise ApiError(400, text, param=shown, code="unknown_parameter")
    # before the validation, which holds the interpreter's lock and builds an object per item
    kind.check_size(data, limits)
    data = {name: value for name, value in data.items() if name not in extra}
    try:
        asked = kind.model_validate(data)
        asked.ignore(*extra)
        return asked
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0]) from None


def _load(body: bytes, limits: Limits) -> Any:
    try:
        text = body.decode("utf-8")
        if len(body) <= UNCOUNTED_BYTES:
            data = json.loads(text)
        else:
            shape = body_shape(body)
            if shape.depth > MAX_DEPTH:
                raise RecursionError
            try:
                limits.check_shape(shape)
            except ApiError:
                if shape.is_closed:
                    raise
                # an unclosed string makes all that follows look like entries, so the counts mean nothing
                raise _not_json("a string, list or object in it has no end") from None
            num_parsed = 0

            # with pauses in which other threads get the interpreter's lock
            def pausing(convert: Callable[[str], T], number: str) -> T:
                nonlocal num_parsed
                num_parsed += 1
                if num_parsed % PAUSE_NUMBERS == 0:
                    time.sleep(PAUSE_S)
                return convert(number)

            data = json.loads(text, parse_int=partial(pausing, int), parse_float=partial(pausing, float))
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


def _not_json(reason: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")


def _refusal(problem: Any) -> ApiError:
    # the expectation that the value violates, and the value if it is short
    kind, value, expected = problem["type"], problem["input"], problem["msg"].removeprefix("Value error, ")
    if kind == "too_short":
        expected = "must not be empty"
    elif kind != "value_error":
        expected = "must be an object" if kind == "model_type" else expected
        expected = expected.replace("Input should be a valid ", "must be a ")
        expected = expected.replace("must be a integer", "must be an integer").replace("Input should be ", "must be ")
        is_scalar = value is None or isinstance(value, (bool, int, float, str))
        if is_scalar and len(str(value)) <= SHOWN_CHARACTERS:
            expected = f"{expected}, got {json.dumps(value)}"
    path = [str(part) for part in problem["loc"]]
    if not path:
        return ApiError(400, f"The request contradicts itself: {expected}.", code="invalid_value")
    name = path[0]
    where = ".".join(part for part in path if part.isdigit() or part.isidentifier())
    if kind == "missing":
        return ApiError(400, f"Missing required field {where!r}.", param=name, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown field {where!r}; remove it.", param=name, code="unknown_parameter")
    return ApiError(400, f"Invalid value for {where!r}: {expected}.", param=name, code="invalid_value")


async def parsed(read: Callable[[], T], num_bytes: int, lease: Lease, *, is_slow: bool = False) -> T:
    """Calls `read`, in another thread if its body is large or `is_slow`, so that streams continue meanwhile."""
    if num_bytes <= INLINE_BODY_BYTES and not is_slow:
        return read()
    result = await asyncio.to_thread(read)
    lease.require_open()  # the server may have begun to drain meanwhile
    return result


async def read_body(request: Request, lease: Lease, *, num_prompts: int) -> bytes:
    """Reads the body, up to the size limit. Raises `ApiError`."""
    config, most = lease.service.config, lease.model.limits.body_bytes(num_prompts)
    length = request.headers.get("content-length", "0")
    # a declared length is refused before it is read; the count below is for bodies sent in chunks
    is_too_large = length.isdigit() and int(length) > most
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            parts = request.stream()
            while not is_too_large and (part := await anext(parts, None)) is not None:
                body += part
                is_too_large = len(body) > most
            if is_too_large:
                # the rest is read, so that the client receives the reply instead of a broken connection; slowly,
                # because every read takes time from the streams
                async for _ in parts:
                    await asyncio.sleep(DISCARD_PAUSE_S)
                raise lease.model.limits.body_too_large(num_prompts)
    except TimeoutError:
        if is_too_large:
            raise lease.model.limits.body_too_large(num_prompts) from None
        raise ApiError(408, f"The body did not arrive within {config.body_timeout_s:g} s.", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "The client left before the body had arrived.") from None
    if config.log_prompts:
        text, name = body.decode("utf-8", errors="replace"), request.scope[ID_SCOPE]
        log.info("%s %s %s", request.url.path, text, name, extra=with_fields(request_id=name))
    return bytes(body)


async def read_request(request: Request, kind: type[R], *, default: bytes = b"") -> R:
    """Reads and validates a request that needs no engine. default: replaces an empty body. Raises `ApiError`."""
    with service_of(request).lease() as lease:
        body = await read_body(request, lease, num_prompts=1)
        return await parsed(lambda: parse_request(kind, body or default, lease.model.limits), len(body), lease)


async def admit(request: Request, lease: Lease, *, num_prompts: int) -> bytes:
    """Reads the body of a request to the engines. Raises `ApiError`."""
    # capacity is checked first, so that an overloaded server spends no time on bodies
    lease.require_room()
    return await read_body(request, lease, num_prompts=num_prompts)


def token_ids(
    prompts: list[str] | list[list[int]],
    param: str,
    lease: Lease,
    *,
    with_begin: bool = True,
    parse_special: bool = False,
) -> list[list[int]]:
    """Returns the ids of prompts; the flags are those of `ServedTokenizer.encode`. Raises `ApiError` 400 without
    prompts, for an empty one and for unknown ids.
    """
    inputs: list[list[int]] = []
    for prompt in prompts:
        is_text = isinstance(prompt, str)
        flags = {"with_begin": with_begin, "parse_special": parse_special}
        inputs.append(lease.model.tokenizer.encode(prompt, **flags) if is_text else known_ids(prompt, param, lease))
        if not inputs[-1]:
            break
    if not inputs or not inputs[-1]:
        raise ApiError(400, f"The {param} is empty; give at least one token.", param=param, code="invalid_value")
    return inputs


def known_ids(ids: list[int], param: str, lease: Lease) -> list[int]:
    """Returns ids unchanged. Raises `ApiError` 400 for ids outside the model's vocabulary."""
    size = lease.model.info.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ApiError(400, f"Token ids must be between 0 and {size - 1}.", param=param, code="invalid_value")
    return ids


def require_fitting(inputs: list[list[int]], param: str, lease: Lease) -> list[list[int]]:
    """Returns inputs unchanged. Raises `ApiError` 400 for an input that is longer than the context."""
    longest, context = max(map(len, inputs)), lease.model.limits.context
    if longest >= context:
        text = f"This model's context is {context} tokens; an input has {longest}. Shorten it."
        raise ApiError(400, text, param=param, code="context_length_exceeded")
    return inputs
