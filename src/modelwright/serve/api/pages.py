"""Routes that describe the server: pages, probes, metrics, models."""

import importlib.resources
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from prometheus_client import generate_latest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve.errors import ApiError
from modelwright.serve.load import expectation
from modelwright.serve.service import Lease, Service, service_of

# a page may talk to its own server alone, so an injected script could send nothing elsewhere
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data:"
)


_NO_SNIFF = {"X-Content-Type-Options": "nosniff"}
_PAGE = {"Content-Security-Policy": PAGE_POLICY} | _NO_SNIFF


def _static(
    operation: str, file: str, media_type: str, headers: Mapping[str, str]
) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler of a file in the folder `static`. operation: its name in /openapi.json."""

    async def handler(request: Request) -> Response:
        text = (importlib.resources.files("modelwright.serve") / "static" / file).read_text(encoding="utf-8")
        return Response(text, media_type=media_type, headers=headers)

    handler.__name__ = operation
    return handler


chat_page = _static("chat_page", "chat.html", "text/html", _PAGE)
live_page = _static("live_page", "live.html", "text/html", _PAGE)
ab_page = _static("ab_page", "ab.html", "text/html", _PAGE)
page_style = _static("page_style", "pages.css", "text/css", _NO_SNIFF)
grafana_dashboard = _static("grafana_dashboard", "grafana.json", "application/json", {})


class HealthReply(BaseModel):
    """The state of the server."""

    status: Literal["ok", "starting", "draining", "failed"]
    model: str
    open_answers: int


async def livez(request: Request) -> Response:
    """Fails when only a restart helps: the liveness probe of Kubernetes."""
    state = service_of(request).state
    if state.name == "broken":
        raise ApiError(503, state.reason, code=state.name)
    return JSONResponse({"status": "alive"})


async def readyz(request: Request) -> Response:
    """Fails while new requests would be refused: the readiness probe of Kubernetes."""
    service = service_of(request)
    if service.state.name != "ready":
        raise ApiError(503, service.state.reason, code=service.state.name)
    return JSONResponse({"status": "ready", "model": service.model_name, "version": service.model.fingerprint})


async def health(request: Request) -> Response:
    service = service_of(request)
    state = {"ready": "ok", "broken": "failed"}.get(service.state.name, service.state.name)
    body = {"status": state, "model": service.model_name, "open_answers": service.num_open}
    return JSONResponse(body, status_code=200 if state == "ok" else 503)


async def metrics(request: Request) -> Response:
    service = service_of(request)
    if service.keys.has_scopes:
        service.caller(request, "metrics")
    text = generate_latest(service.metrics.registry)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class ModelReply(BaseModel):
    """A name of the model or of an adapter, whose `parent` is the model. `root`, `stage` and `digest` are absent for a
    model that exists in memory only, `stage` and `digest` for an adapter.
    """

    id: str
    object: Literal["model"]
    parent: str | None
    created: int
    owned_by: str
    max_model_len: int
    description: str
    page_tools: bool
    """The chat page offers tools (`serve --mcp`)."""
    root: str = ""
    stage: str = ""
    digest: str = ""


class ModelListReply(BaseModel):
    """All names of the model."""

    object: Literal["list"]
    data: list[ModelReply]


async def list_models(request: Request) -> Response:
    service = service_of(request)
    service.caller(request, "infer")
    names = service.names_of(service.model)
    return JSONResponse({"object": "list", "data": [_describe(service, name) for name in names]})


async def get_model(request: Request) -> Response:
    service = service_of(request)
    service.caller(request, "infer")
    Lease(service, service.model).require_model(request.path_params["name"])
    return JSONResponse(_describe(service, request.path_params["name"]))


def _describe(service: Service, name: str) -> dict[str, Any]:
    """Returns an entry of /v1/models. `root` (as in vLLM), `stage` and `digest` identify the model, `parent` (as in
    vLLM) names the model of an adapter, `description` says what to expect of its answers.
    """
    source, adapter = service.model.source, service.model.adapter_of(name)
    origin = {"root": str(source.folder), "stage": source.stage, "digest": source.digest} if source else {}
    origin = {"root": str(adapter.folder)} if adapter else origin
    return origin | {
        "id": name,
        "object": "model",
        "parent": service.model_name if adapter else None,
        "created": adapter.created if adapter else service.model.created,
        "owned_by": "modelwright",
        "max_model_len": service.model.info.max_seq_len,
        "input_modalities": ["text", "image"] if service.model.info.reads_images else ["text"],
        "page_tools": "mcp" in service.extensions,
        "description": expectation(service.model.info.num_parameters),
    }
