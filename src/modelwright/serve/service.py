"""State shared by the routes, and what every request must pass: key, capacity, model."""

from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import ApiError, shutting_down
from modelwright.serve.keys import Caller, KeyRing, KeyScope
from modelwright.serve.limits import Limits
from modelwright.serve.metrics import Metrics
from modelwright.serve.served_model import ServedModel
from modelwright.serve.tokenizer import Codec
from modelwright.serve.worker import RETRY_AFTER_S, EngineWorker


@dataclass(frozen=True)
class ServiceState:
    """Whether the server takes requests, and why it does not."""

    name: Literal["ready", "draining", "broken"]
    reason: str = ""


@dataclass
class Service:
    """A server's state. `model`: the version that new requests get."""

    config: ServeConfig
    model_name: str
    model: ServedModel
    metrics: Metrics
    keys: KeyRing = field(repr=False)
    is_draining: bool = False

    @property
    def worker(self) -> EngineWorker:
        return self.model.worker

    @property
    def codec(self) -> Codec:
        return self.model.codec

    @property
    def limits(self) -> Limits:
        return self.model.limits

    @property
    def state(self) -> ServiceState:
        """A broken server stays broken until it is started again; one that drains ends soon."""
        if self.worker.failed:
            return ServiceState("broken", "The engine has failed; restart the server and see its log.")
        if self.is_draining:
            return ServiceState("draining", "The server is shutting down; try another one or try again later.")
        return ServiceState("ready")

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return (self.model_name, *self.config.model_aliases)

    def require_open(self) -> None:
        if self.is_draining:
            raise shutting_down(self.state.reason, RETRY_AFTER_S)

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a name that the model does not have; None is any model."""
        if name is not None and name not in self.names:
            known = " or ".join(map(repr, self.names))
            text = f"The model {name!r} does not exist; this server has {known}."
            raise ApiError(404, text, param="model", code="model_not_found")

    def caller(self, request: Request, scope: KeyScope) -> Caller:
        """Who asks. Raises `ApiError` 401 without a key that the server knows, 403 if the key may not do this, 429 if
        its requests are used up.
        """
        caller = self.keys.caller(request.headers.get("authorization", ""))
        caller.require_scope(scope)
        caller.count_request()
        return caller


def service_of(request: Request) -> Service:
    return request.app.state.service
