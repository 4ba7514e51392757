"""The routes of A/B tests."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve.ab.controller import Experiments
from modelwright.serve.ab.experiment import EndRequest, ExperimentRequest, ShareRequest, Status
from modelwright.serve.api.fields import RequestModel
from modelwright.serve.api.parsing import read_request
from modelwright.serve.errors import ApiError
from modelwright.serve.service import service_of

R = TypeVar("R", bound=RequestModel)


class ExperimentReply(BaseModel):
    """An A/B test (docs/ab-tests.md). Infinite bounds of intervals are null."""

    name: str
    mode: Literal["split", "shadow"]
    unit: Literal["session", "user"]
    share: float
    status: Status
    reason: str
    started_at: float
    ended_at: float | None
    versions: dict[str, str]
    requests: dict[str, int]
    errors: dict[str, int]
    shadows: dict[str, int]
    sample_ratio: dict[str, Any]
    measures: list[dict[str, Any]]
    slow_s: float | None
    guard: dict[str, Any]
    fixed_horizon: dict[str, Any]


class ExperimentListReply(BaseModel):
    """All tests, newest first. `is_on`: whether A/B tests are enabled on the server."""

    is_on: bool
    tests: list[ExperimentReply]


async def list_tests(request: Request) -> Response:
    """Returns the data of the page `/ab`. Like `/metrics`, it asks for a key if the server has a key file."""
    service = service_of(request)
    if service.keys.has_scopes:
        service.caller(request, "metrics")
    tests = request.app.state.experiments
    return JSONResponse({"is_on": tests is not None, "tests": await tests.reports() if tests else []})


def _changing(
    operation: str, kind: type[R], change: Callable[[Experiments, R], Awaitable[dict[str, Any]]]
) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler of a change, which replies with the report. operation: its name in /openapi.json."""

    async def handler(request: Request) -> Response:
        service_of(request).caller(request, "admin")
        asked = await read_request(request, kind)
        tests = request.app.state.experiments
        if tests is None:
            text = "This server keeps no state of A/B tests; start it with --requests.ab_state FILE."
            raise ApiError(404, text, code="tests_off")
        return JSONResponse(await change(tests, asked))

    handler.__name__ = operation
    return handler


begin_test = _changing("begin_test", ExperimentRequest, lambda tests, asked: tests.begin(asked))
set_test_share = _changing("set_test_share", ShareRequest, lambda tests, asked: tests.set_share(asked.share))
end_test = _changing("end_test", EndRequest, lambda tests, asked: tests.end(promote=asked.promote))
