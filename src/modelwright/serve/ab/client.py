"""A client of the routes of A/B tests, for programs that promote a model."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from modelwright.core.errors import ModelwrightError

TIMEOUT_S = 300.0
"""Loading a version may take long."""
AWAY = (502, 503, 504)
"""Statuses with which a proxy answers for a server that is away."""


class ServerUnreachable(ModelwrightError):
    """The server did not answer; it may do so later."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes redirects for failures: a redirected POST becomes a GET without the message, whose success would say
    nothing, and the headers, with a key among them, would go to another host.
    """

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class AbClient:
    """Talks to the server at `url`. key: with the scopes `admin` and `metrics`; "" for a server without keys."""

    url: str
    key: str = field(default="", repr=False)

    def find(self, name: str) -> dict[str, Any] | None:
        """The report of a test, None if there is none of this name. Raises `ModelwrightError` if the server keeps no
        tests, and `ServerUnreachable`.
        """
        answer = self._ask("GET", "/ab.json")
        if not answer["is_on"]:
            raise ModelwrightError(f"{self.url}: keeps no A/B tests; start it with --requests.ab_state FILE")
        return next((test for test in answer["tests"] if test["name"] == name), None)

    def begin(self, name: str, path: str, **fields: Any) -> dict[str, Any]:
        """Begin a test of the model at `path`; the report. Raises as `find` does."""
        return self._ask("POST", "/admin/ab", {"name": name, "path": path, **fields})

    def end(self, *, promote: bool) -> dict[str, Any]:
        """End the running test; the report. Raises as `find` does."""
        return self._ask("POST", "/admin/ab/end", {"promote": promote})

    def _ask(self, method: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + route, data=data, headers=headers, method=method)
        where = f"{method} {route} of {shown_host(self.url) or self.url}"
        try:
            with urllib.request.build_opener(NoRedirects()).open(request, timeout=TIMEOUT_S) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                kind = ServerUnreachable if error.code in AWAY else ModelwrightError
                raise kind(f"{where}: {error.code}, {_message(error.read())}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerUnreachable(f"{where}: {getattr(error, 'reason', error)}; is the server running?") from None


def _message(body: bytes) -> str:
    """The message of an error reply, or its first bytes if it is not one of ours."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "no explanation"


def shown_host(url: str) -> str:
    """The host of an address, which may be logged because it has neither a password nor a token."""
    return urllib.parse.urlsplit(url).hostname or ""
