"""A client of the routes of A/B tests, for programs that promote a model."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from modelwright.core.config import ModelwrightError

TIMEOUT_S = 300.0
"""Loading a version may take long."""
AWAY = (502, 503, 504)
"""Statuses that a proxy returns while the server behind it is down."""


class ServerUnreachable(ModelwrightError):
    """The server did not answer; it may do so later."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats redirects as failures: urllib would turn a redirected POST into a GET without the body, whose success says
    nothing, and would send the headers, the key among them, to another host.
    """

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class AbClient:
    """Talks to the server at `url`. key: with the scopes `admin` and `metrics`; "" for a server without keys."""

    url: str
    key: str = field(default="", repr=False)

    def find(self, name: str) -> dict[str, Any] | None:
        """Returns a test's report, None if unknown. Raises `ServerUnreachable`, `ModelwrightError` without tests."""
        answer = self._ask("GET", "/ab.json")
        if not answer["is_on"]:
            raise ModelwrightError(f"{self.url}: keeps no A/B tests; start it with --requests.ab_state FILE")
        return next((test for test in answer["tests"] if test["name"] == name), None)

    def begin(self, name: str, path: str, **fields: Any) -> dict[str, Any]:
        """Begins a test of the model at `path` and returns the report. Raises as `find` does."""
        return self._ask("POST", "/admin/ab", {"name": name, "path": path, **fields})

    def end(self, *, promote: bool) -> dict[str, Any]:
        """Ends the running test and returns the report. Raises as `find` does."""
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
                kind, content = ServerUnreachable if error.code in AWAY else ModelwrightError, error.read()
            try:
                message = str(json.loads(content)["error"]["message"])
            except (ValueError, KeyError, TypeError):
                # a proxy answers in its own form
                message = content[:200].decode("utf-8", "replace") or "no explanation"
            raise kind(f"{where}: {error.code}, {message}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerUnreachable(f"{where}: {getattr(error, 'reason', error)}; is the server running?") from None


def shown_host(url: str) -> str:
    """Host of a URL. It is safe to log, unlike the URL, which may contain a password or a token."""
    return urllib.parse.urlsplit(url).hostname or ""
