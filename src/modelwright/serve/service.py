"""State shared by the routes, the checks of every request (key, capacity, model), and exchanges: requests for answers
and their outcomes, as the observers see them (request log, A/B tests, spans).
"""

import contextvars
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, model_validator
from starlette.requests import Request

from modelwright.serve.ab.experiment import CONTROL, Assignment
from modelwright.serve.account.monitoring import Metrics
from modelwright.serve.api.fields import GenerationRequest, RequestModel
from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import ApiError, shutting_down
from modelwright.serve.generation import Generation
from modelwright.serve.keys import Caller, KeyRing, KeyScope
from modelwright.serve.served_model import EngineWorker, ServedModel

RouteName = Literal["chat", "completion"]

SESSION_ENTRY = "session_id"
"""Key of the session in a request's `metadata`."""
CLIENT_LEFT = 499
"""Nginx's status for a client that closed the connection."""


@dataclass(frozen=True)
class Subject:
    """The author of a request in clear text, which is hashed before it is stored. user: name of the key and `user` of
    the request; session: name of the session in the request, else the beginning of its conversation.
    """

    user: str = field(repr=False)
    session: str = field(repr=False)


def pseudonym(salt: str, text: str) -> str:
    """Returns 16 hex digits of HMAC-SHA-256, which do not reveal the text without the salt."""
    return hmac.new(salt.encode(), text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """A finished request. id: random id of the answer; times in seconds; texts of several prompts or answers are joined
    by blank lines. version: version of the weights with the adapter, or of the model alone if no answer was begun.
    `ttft_s` is None without a token, `latency_s` without a complete answer.
    """

    id: str
    time: float
    subject: Subject
    route: RouteName
    model: str
    version: str
    assignment: Assignment | None
    prompt: str = field(repr=False)
    answer: str = field(repr=False)
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    status: int
    ttft_s: float | None
    latency_s: float | None


class FeedbackRequest(RequestModel):
    """POST /v1/feedback. `id`: id of the answer, from its body; `score`: from -1 (bad) to 1 (good)."""

    id: Annotated[str, Field(pattern="^[A-Za-z0-9-]{1,64}$")]
    score: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = None
    label: Annotated[str, Field(pattern="^[A-Za-z][A-Za-z_ -]{0,63}$")] | None = None
    text: Annotated[str, Field(max_length=4000)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "FeedbackRequest":
        if self.score is None and self.label is None and not self.text:
            raise ValueError("give a score, a label or a text")
        return self


class ExchangeObserver(Protocol):
    """Records finished requests. All methods belong to the event loop, and none may wait for a disk. `keeps_answers`:
    whether it accepts feedback on answers.
    """

    keeps_answers: bool

    def ended(self, exchange: "Exchange", finished: FinishedRequest) -> None: ...

    async def take_feedback(self, feedback: FeedbackRequest) -> bool:
        """Commits feedback. Returns false for an unknown answer. Raises `ApiError` 503 if it cannot be committed."""
        ...


OpenOn = Callable[[ServedModel, Caller], Awaitable[Generation]]
"""Starts the answers to a request on a version, on behalf of a caller. Raises `ApiError`."""


@dataclass(kw_only=True)
class Exchange:
    """A validated request while it is answered. Its outcome is reported to the observers once. `context`: context of
    the task that has read it; a stream may end in another task.
    """

    asked: GenerationRequest
    route: RouteName
    subject: Subject
    model: ServedModel
    assignment: Assignment | None
    observers: Sequence[ExchangeObserver]
    open_on: OpenOn
    generation: Generation | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    started_at: float = field(default_factory=time.time)
    _started: float = field(default_factory=time.perf_counter)
    _is_open: bool = True

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Covers the time until the answers are open, in which only an error ends the exchange."""
        try:
            yield
        except BaseException as error:
            self._end(_status_of(error))
            raise

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Covers the time in which the answers arrive, and ends the exchange."""
        status = 200
        try:
            yield
        except BaseException as error:
            status = _status_of(error)
            raise
        finally:
            self._end(status)

    def _end(self, status: int) -> None:
        if not self._is_open:  # an error may end the exchange before `answering` does
            return
        self._is_open = False
        if not self.observers:
            return
        generation = self.generation
        answers = generation.answers if generation else []
        first_token = generation.first_token if generation else 0.0
        elapsed_s = time.perf_counter() - self._started
        tokenizer = self.model.tokenizer
        finished = FinishedRequest(
            id=generation.answer_id if generation else f"refused-{secrets.token_hex(12)}",
            time=self.started_at,
            subject=self.subject,
            route=self.route,
            model=self.asked.model,
            version=generation.version if generation else self.model.fingerprint,
            assignment=self.assignment,
            prompt="\n\n".join(self.asked.texts() or [tokenizer.decode(answer.prompt.ids) for answer in answers]),
            answer="\n\n".join(answer.new_text for answer in answers),
            prompt_tokens=generation.num_prompt_tokens if generation else 0,
            completion_tokens=generation.num_completion_tokens if generation else 0,
            # each reason once, in the order of the answers
            finish_reason=",".join(dict.fromkeys(a.finish_reason for a in answers if a.finish_reason)),
            status=status,
            ttft_s=first_token - self._started if first_token else None,
            latency_s=elapsed_s if status == 200 else None,
        )
        for observer in self.observers:
            observer.ended(self, finished)


def _status_of(error: BaseException) -> int:
    if isinstance(error, ApiError):
        return error.status
    # others are asyncio's for a canceled task and GeneratorExit; the server drops the work for a client that left
    return 500 if isinstance(error, Exception) else CLIENT_LEFT


@dataclass(frozen=True)
class Arms:
    """A running A/B test. candidate: the version that is tested; assign: returns the arm of a request, or None if users
    never get the candidate; request_arrived: called before a request is read.
    """

    candidate: ServedModel
    assign: Callable[[Subject], Assignment | None]
    request_arrived: Callable[[], None]


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
    loop_lag_s: float = 0.0
    """How late the event loop was at its last measurement: about as long as a request has waited to be read."""
    retiring: list[ServedModel] = field(default_factory=list)
    observers: list[ExchangeObserver] = field(default_factory=list)
    arms: Arms | None = None
    starting: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Called when the server starts, for routes of other packages."""
    closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    extensions: dict[str, Any] = field(default_factory=dict)
    """State of routes of other packages, by the package's word."""

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
        """Returns the caller of a request, and counts the request once. Raises `ApiError` 401 without a known key, 403
        if the key lacks the scope, 429 if its requests are used up.
        """
        admitted: dict[str, Caller] = request.scope.setdefault("modelwright.callers", {})
        if scope not in admitted:
            caller = self.keys.caller(request.headers.get("authorization", ""))
            caller.admit(scope)
            admitted[scope] = caller
        return admitted[scope]


@dataclass(frozen=True)
class Lease:
    """A request's hold on one version of the model."""

    service: Service
    model: ServedModel

    def require_open(self) -> None:
        """Raises `ApiError` 503 while the server drains."""
        if self.service.is_draining:
            raise shutting_down(self.service.state.reason)

    def require_room(self) -> None:
        """Raises `ApiError` like `require_open`, and like `EngineWorker.require_room` for one answer."""
        self.require_open()
        self.model.worker.require_room(1, loop_lag_s=self.service.loop_lag_s)

    def require_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 for a name that this version does not have. None means any model."""
        # the version in service may have the name meanwhile, but the request was read for this one
        names = self.service.names_of(self.model)
        if name is not None and name not in names:
            text = f"The model {name!r} does not exist; this server has {' or '.join(map(repr, names))}."
            raise ApiError(404, text, param="model", code="model_not_found")


IGNORED_HEADER = "X-Ignored-Fields"
"""Response header with the fields of a request that were accepted and changed nothing."""
VERSION_HEADER = "X-Model-Version"
"""Response header that identifies the weights."""


def service_of(request: Request) -> Service:
    return request.app.state.service
