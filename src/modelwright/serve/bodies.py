"""Reads request bodies up to a size and within a time, and parses large ones beside the event loop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from modelwright.serve.account.logs import ID_SCOPE, with_fields
from modelwright.serve.errors import ApiError
from modelwright.serve.service import Lease

log = logging.getLogger("modelwright.serve")

T = TypeVar("T")

INLINE_BODY_BYTES = 16_384
"""Smaller bodies are read in less time than it takes to hand them to another thread and back."""

DISCARD_PAUSE_S = 0.01
"""Between two reads (of up to 256 KiB each) of a body that is too large."""


async def parsed(read: Callable[[], T], num_bytes: int, lease: Lease, *, is_slow: bool = False) -> T:
    """`read`, in another thread if the body that it works on is large, so that streams continue meanwhile. is_slow: the
    same for a small one.
    """
    if num_bytes <= INLINE_BODY_BYTES and not is_slow:
        return read()
    result = await asyncio.to_thread(read)
    lease.require_open()
    return result


async def read_body(request: Request, lease: Lease, *, num_prompts: int) -> bytes:
    """The body, up to the size limit. Raises `ApiError`."""
    config, most = lease.config, lease.model.limits.body_bytes(num_prompts)
    length = request.headers.get("content-length", "0")
    is_too_large = length.isdigit() and int(length) > most
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            parts = request.stream()
            while not is_too_large and (part := await anext(parts, None)) is not None:
                body += part
                is_too_large = len(body) > most
            if is_too_large:
                await _discard(parts)
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


async def _discard(parts: AsyncIterator[bytes]) -> None:
    """Read the rest of a rejected body, so that the client receives the answer and not a broken connection; slowly,
    because every read takes time from the streams.
    """
    async for _ in parts:
        await asyncio.sleep(DISCARD_PAUSE_S)
