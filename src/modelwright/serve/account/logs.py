"""The server's log: one line per request, as text or as JSON, with the id of the request."""

import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from modelwright.serve.config import LogFormat

ROOT = "modelwright.serve"
ID_HEADER = "X-Request-Id"
ID_SCOPE = "modelwright.request_id"
"""Key of the request's id in its ASGI scope."""

_ID_OF_CLIENT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELDS = "modelwright_fields"


def request_id(headers: Mapping[str, str]) -> str:
    """Returns the id in the client's header, or a new one if the header is missing or could forge a line of the log."""
    client_id = headers.get(ID_HEADER, "")
    return client_id if _ID_OF_CLIENT.fullmatch(client_id) else secrets.token_hex(8)


def with_fields(**fields: Any) -> dict[str, Any]:
    """Returns the `extra` of a log call that adds these fields to its JSON line."""
    return {_FIELDS: fields}


class JsonLines(logging.Formatter):
    """Formats a log line as a JSON object: time, level, logger, message, the call's fields, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= vars(record).get(_FIELDS, {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


@contextmanager
def log_to_stderr(form: LogFormat) -> Iterator[None]:
    """Sends the server's log to standard error, unless the program has configured logging itself."""
    log = logging.getLogger(ROOT)
    if logging.root.handlers or log.handlers:
        yield
        return
    handler, level = logging.StreamHandler(sys.stderr), log.level
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
