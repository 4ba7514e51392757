"""Exchanges: requests for answers and their outcomes, as the observers see them (request log, A/B tests, spans)."""

import contextvars
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from pydantic import Field, model_validator

from modelwright.serve.ab.state import Assignment
from modelwright.serve.api.fields import RequestModel
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Generation, GenerationRequest
from modelwright.serve.keys import Caller
from modelwright.serve.served_model import ServedModel

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


def subject_of(asked: GenerationRequest, key_name: str) -> Subject:
    """Returns the subject. Turns of one conversation share a session, because each repeats those before."""
    user = f"{key_name}\0{asked.user or ''}"
    session = (asked.metadata or {}).get(SESSION_ENTRY) or f"\0{asked.session_text()}"
    return Subject(user, f"{user}\0{session}")


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
