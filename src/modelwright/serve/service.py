"""State shared by the routes, and what every request must pass: key, capacity, model."""

import hmac
from dataclasses import dataclass, field

from starlette.requests import Request

from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import ApiError, shutting_down
from modelwright.serve.limits import Limits
from modelwright.serve.metrics import Metrics
from modelwright.serve.served_model import ServedModel
from modelwright.serve.tokenizer import Codec
from modelwright.serve.worker import RETRY_AFTER_S, EngineWorker


@dataclass
class Service:
    """A server's state. `model`: the version that new requests get."""

    config: ServeConfig
    model_name: str
    model: ServedModel
    metrics: Metrics
    api_key: str = field(default="", repr=False)
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
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return (self.model_name, *self.config.model_aliases)

    def require_open(self) -> None:
        if self.is_draining:
            raise shutting_down("The server is shutting down; try another one or try again later.", RETRY_AFTER_S)

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a name that the model does not have; None is any model."""
        if name is not None and name not in self.names:
            known = " or ".join(map(repr, self.names))
            text = f"The model {name!r} does not exist; this server has {known}."
            raise ApiError(404, text, param="model", code="model_not_found")

    def authorize(self, request: Request) -> None:
        """Raises `ApiError` 401 without the key that the server asks for."""
        if not self.api_key:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(key.strip().encode(), self.api_key.encode())
        if scheme.lower() != "bearer" or not matches:
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "Missing or wrong API key.", code="invalid_api_key", headers=headers)


def service_of(request: Request) -> Service:
    return request.app.state.service
