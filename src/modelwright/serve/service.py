"""State shared by the routes, and the checks of every request: key, capacity, model."""

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
from modelwright.serve.served_model import ServedModel


class Arms(Protocol):
    """A running A/B test. candidate: the version that is tested."""

    candidate: ServedModel

    def assign(self, subject: Subject) -> Assignment | None:
        """Returns the arm of a request, or None if users never get the candidate."""
        ...

    def request_arrived(self) -> None:
        """Called before a request is read."""
        ...


@dataclass(frozen=True)
class ServiceState:
    """The state of the server, and the reason why it does not accept requests."""

    name: Literal["ready", "starting", "draining", "broken"]
    reason: str = ""


@dataclass
class Service:
    """A server's state. `model`: version for new requests, unless an A/B test assigns them to the candidate of `arms`;
    `retiring`: versions that still finish answers; `observers`: recorders of finished requests.
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
        """Holds the version for new requests until the request has been read and its answers are open. A reload
        meanwhile must not mix two versions in one request.
        """
        model = self.model
        with model.worker.held():
            if self.arms is not None:
                self.arms.request_arrived()
            yield Lease(self, model)

    @contextmanager
    def arm(self, entry: "Lease", subject: Subject) -> Iterator[tuple["Lease", Assignment | None]]:
        """Holds the version that answers a request, and yields it with the request's assignment in the running A/B
        test. Without a test it is the version of `entry`.
        """
        assignment = self.arms.assign(subject) if self.arms else None
        if self.arms is None or assignment is None or assignment.arm == CONTROL:
            yield entry, assignment
            return
        # the lease of `entry` holds only the other version
        model = self.arms.candidate
        with model.worker.held():
            yield Lease(self, model), assignment

    @property
    def workers(self) -> list[EngineWorker]:
        """Workers of all versions that get requests or have answers to finish."""
        models = [self.model, *([self.arms.candidate] if self.arms else []), *self.retiring]
        return [model.worker for model in models]

    @property
    def worker(self) -> EngineWorker:
        return self.model.worker

    @property
    def state(self) -> ServiceState:
        # in this order: a broken server stays broken until it is restarted, and a draining one ends soon
        if self.worker.failed:
            return ServiceState("broken", self.worker.client.unavailable)
        if self.is_draining:
            return ServiceState("draining", "The server is shutting down; try another one or try again later.")
        if self.worker.client.unavailable:
            return ServiceState("starting", self.worker.client.unavailable)
        return ServiceState("ready")

    def names_of(self, model: ServedModel) -> tuple[str, ...]:
        """Returns the names of a version and its adapters, with aliases of the adapters that are loaded."""
        targets = model.aliases
        names = [name for name in self.config.alias_names if targets.get(name, name) in (name, *model.adapters)]
        return (self.model_name, *names, *model.adapters)

    @property
    def num_open(self) -> int:
        """Number of answers that are running or waiting."""
        return sum(worker.num_open for worker in self.workers)

    def caller(self, request: Request, scope: KeyScope) -> Caller:
        """Returns the caller of a request, and counts the request. Raises `ApiError` 401 without a known key, 403 if
        the key lacks the scope, 429 if its requests are used up.
        """
        caller = self.keys.caller(request.headers.get("authorization", ""))
        caller.admit(scope)
        return caller


@dataclass(frozen=True)
class Lease:
    """A request's hold on one version of the model."""

    service: Service
    model: ServedModel

    def require_open(self) -> None:
        """Raises `ApiError` 503 while the server drains."""
        if self.service.is_draining:
            raise shutting_down(self.service.state.reason, RETRY_AFTER_S)

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a name that this version does not have. None means any model."""
        # the version in service may have the name meanwhile, but the request was read for this one
        names = self.service.names_of(self.model)
        if name is not None and name not in names:
            text = f"The model {name!r} does not exist; this server has {' or '.join(map(repr, names))}."
            raise ApiError(404, text, param="model", code="model_not_found")


VERSION_HEADER = "X-Model-Version"


def version_header(version: str) -> dict[str, str]:
    """Returns the response header that identifies the weights."""
    return {VERSION_HEADER: version}


def service_of(request: Request) -> Service:
    return request.app.state.service
