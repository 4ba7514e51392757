"""Sends one JSON message to a webhook. Retries are the caller's concern."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from modelwright.core.config import ConfigError
from modelwright.serve.ab.client import NoRedirects


def check_webhook(url: str) -> None:
    """Raises `ConfigError` unless `url` is an HTTP address. The error does not quote it, since it may
    contain a secret.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError("--webhook: is not an address; write https://HOST/PATH")


def post_json(url: str, message: Mapping[str, Any], *, idempotency_key: str, timeout_s: float) -> str:
    """POSTs a message; returns "" if the answer's status is 2xx, else a description of the failure without
    the address.
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(message, ensure_ascii=False).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": idempotency_key},
        method="POST",
    )
    try:
        # A redirect would send the message to an address that the user did not name.
        with urllib.request.build_opener(NoRedirects()).open(request, timeout=timeout_s) as answer:
            answer.read(1)
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"status {error.code}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__
