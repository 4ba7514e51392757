"""Errors in OpenAI's form, which its clients understand, and the server's log."""

import logging
import math
import secrets
from typing import Any

log = logging.getLogger("modelwright.serve")
"""The log of the whole server (see `monitoring`)."""


class ApiError(Exception):
    """An API error: HTTP status, message, offending field and error code."""

    def __init__(
        self, status: int, message: str, *, param: str = "", code: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str = "", code: str = "") -> dict[str, Any]:
    """Returns `{"error": {"message", "type", "param", "code"}}`."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "server_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}


def jittered(wait_s: float) -> int:
    """Returns whole seconds for Retry-After: the wait and up to a quarter more."""
    # clients that were refused at the same time must not all come back at the same time
    return max(1, math.ceil(wait_s * (1 + 0.25 * secrets.randbelow(1000) / 1000)))


def limit_reached(message: str, wait_s: float) -> ApiError:
    """Returns a 429 with Retry-After, on which OpenAI clients retry. wait_s: estimated time until there is room."""
    text = f"{message} Try again later."
    return ApiError(429, text, code="rate_limit_exceeded", headers={"Retry-After": str(jittered(wait_s))})


RETRY_AFTER_S = 2
"""Retry-After of a server that shuts down or is out of connections. It is short, because another one may answer."""


def shutting_down(message: str) -> ApiError:
    """Returns a 503 with Retry-After."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})


ENGINE_LOST = "The engine that computed this answer was lost, and it cannot be continued; send the request again."


def engine_lost(text: str = ENGINE_LOST) -> ApiError:
    """Returns a 503 for an answer whose engine is gone."""
    return ApiError(503, text, code="engine_lost", headers={"Retry-After": "1"})
