"""State shared by the routes, and what every request must pass: key, capacity, model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from starlette.requests import Request

from modelwright.serve.ab.state import CONTROL, Assignment
from modelwright.serve.account.exchange import ExchangeObserver, Subject
from modelwright.serve.account.metrics import Metrics
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.worker import RETRY_AFTER_S, EngineWorker
from modelwright.serve.errors import ApiError, shutting_down
from modelwright.serve.keys import Caller, KeyRing, KeyScope
from modelwright.serve.limits import Limits
from modelwright.serve.served_model import ServedModel
from modelwright.serve.tokenizer import ServedTokenizer


class Arms(Protocol):
    """An A/B test that is running."""

    @property
    def candidate(self) -> ServedModel:
        """The version that is tested."""
        ...

    def assign(self, subject: Subject) -> Assignment | None:
        """The arm of a request, None if no request gets the candidate."""
        ...

    def request_arrived(self) -> None:
        """Told before a request is read."""
        ...


@dataclass(frozen=True)
class ServiceState:
    """Whether the server takes requests, and why it does not."""

    name: Literal["ready", "starting", "draining", "broken"]
    reason: str = ""


@dataclass
class Service:
    """A server's state. `model`: the version that new requests get, unless an A/B test gives them the other one of its
    `arms`; `retiring`: versions that still finish answers; `observers`: who keeps account of requests.
    """

    config: ServeConfig
    model_name: str
    model: ServedModel
    metrics: Metrics
    keys: KeyRing = field(repr=False)
    is_draining: bool = False
    retiring: list[ServedModel] = field(default_factory=list)
    observers: list[ExchangeObserver] = field(default_factory=list)
    arms: Arms | None = None

    @contextmanager
    def lease(self) -> Iterator["Lease"]:
        """The version that new requests get. It stays in service until the request has been read and its answers are
        open, so that a reload meanwhile does not mix two versions in it.
        """
        model = self.model
        with model.worker.held():
            if self.arms is not None:
                self.arms.request_arrived()
            yield Lease(self, model)

    @contextmanager
    def arm(self, entry: "Lease", subject: Subject) -> Iterator[tuple["Lease", Assignment | None]]:
        """The version that answers a request and its place in the A/B test that is running; without one, the version
        that its body was read for.
        """
        assignment = self.arms.assign(subject) if self.arms else None
        if self.arms is None or assignment is None or assignment.arm == CONTROL:
            yield entry, assignment
            return
        model = self.arms.candidate
        with model.worker.held():
            yield Lease(self, model), assignment

    @property
    def models(self) -> list[ServedModel]:
        """All versions that take requests or have answers to finish."""
        return [self.model, *([self.arms.candidate] if self.arms else []), *self.retiring]

    @property
    def workers(self) -> list[EngineWorker]:
        """Those of all versions that have answers to finish."""
        return [model.worker for model in self.models]

    @property
    def worker(self) -> EngineWorker:
        return self.model.worker

    @property
    def tokenizer(self) -> ServedTokenizer:
        return self.model.tokenizer

    @property
    def limits(self) -> Limits:
        return self.model.limits

    @property
    def state(self) -> ServiceState:
        """A broken server stays broken until it is started again; one that drains ends soon."""
        if self.worker.failed:
            return ServiceState("broken", self.worker.client.unavailable)
        if self.is_draining:
            return ServiceState("draining", "The server is shutting down; try another one or try again later.")
        if self.worker.client.unavailable:
            return ServiceState("starting", self.worker.client.unavailable)
        return ServiceState("ready")

    def names_of(self, model: ServedModel) -> tuple[str, ...]:
        """What clients may call a version and its adapters; an alias of an adapter as long as that is loaded."""
        targets = model.aliases
        names = [name for name in self.config.alias_names if targets.get(name, name) in (name, *model.adapters)]
        return (self.model_name, *names, *model.adapters)

    @property
    def num_open(self) -> int:
        """Answers that are running or waiting."""
        return sum(worker.num_open for worker in self.workers)

    def require_open(self) -> None:
        if self.is_draining:
            raise shutting_down(self.state.reason, RETRY_AFTER_S)

    def require_name(self, name: str | None, model: ServedModel) -> None:
        """Raises `ApiError` 404 for a name that a version does not have; None is any model."""
        names = self.names_of(model)
        if name is not None and name not in names:
            known = " or ".join(map(repr, names))
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


@dataclass(frozen=True)
class Lease:
    """A request's hold on one version of the model."""

    service: Service
    model: ServedModel

    @property
    def config(self) -> ServeConfig:
        return self.service.config

    def require_open(self) -> None:
        self.service.require_open()

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a name that this version does not have, whatever the one in service has now."""
        self.service.require_name(name, self.model)


VERSION_HEADER = "X-Model-Version"


def version_header(version: str) -> dict[str, str]:
    """The header of an answer that says which weights made it."""
    return {VERSION_HEADER: version}


def service_of(request: Request) -> Service:
    return request.app.state.service
