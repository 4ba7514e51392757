"""One request for answers and what became of it, as those see it who keep account: the request log, A/B tests and
spans.
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

from modelwright.serve.ab.state import Assignment
from modelwright.serve.api.fields import RequestModel
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Generation, GenerationRequest
from modelwright.serve.keys import Caller
from modelwright.serve.limits import Limits
from modelwright.serve.served_model import ServedModel

RouteName = Literal["chat", "completion"]

SESSION_ENTRY = "session_id"
"""The entry of a request's `metadata` that names its session."""

CLIENT_LEFT = 499


@dataclass(frozen=True)
class Subject:
    """Who asks, in clear text: it is hashed before it is written anywhere. user: the name of the key, and the `user` of
    the request; session: what the request calls its session, else the beginning of its conversation.
    """

    user: str = field(repr=False)
    session: str = field(repr=False)


def subject_of(asked: GenerationRequest, key_name: str) -> Subject:
    """Turns of one conversation have the same session, because each repeats the turns before."""
    user = f"{key_name}\0{asked.user or ''}"
    session = (asked.metadata or {}).get(SESSION_ENTRY) or f"\0{asked.session_text()}"
    return Subject(user, f"{user}\0{session}")


def pseudonym(salt: str, text: str) -> str:
    """A name from which nobody without the salt can tell the text: 16 hex digits of HMAC-SHA-256."""
    return hmac.new(salt.encode(), text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """A finished request. id: of the answer, which the server drew; times in seconds; texts of several prompts or
    answers are joined by blank lines. version: of the weights, those of the adapter included, but of the model alone if
    no answer was begun. `ttft_s` is None if there was no token, `latency_s` if there was no whole answer.
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
    """POST /v1/feedback. `id`: of the answer, as its body has it; `score`: from -1 (bad) to 1 (good)."""

    id: Annotated[str, Field(pattern="^[A-Za-z0-9-]{1,64}$")]
    score: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = None
    label: Annotated[str, Field(pattern="^[A-Za-z][A-Za-z_ -]{0,63}$")] | None = None
    text: Annotated[str, Field(max_length=4000)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "FeedbackRequest":
        if self.score is None and self.label is None and not self.text:
            raise ValueError("give a score, a label or a text")
        return self

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """The fields' own limits are enough."""


class ExchangeObserver(Protocol):
    """Keeps account of requests. All methods belong to the event loop, and none may wait for a disk. `keeps_answers`:
    whether it takes feedback on them.
    """

    @property
    def keeps_answers(self) -> bool: ...

    def ended(self, exchange: "Exchange", finished: FinishedRequest) -> None: ...

    async def take_feedback(self, feedback: FeedbackRequest) -> bool:
        """Whether there is such an answer; if so, the feedback is committed. Raises `ApiError` 503 if it cannot be."""
        ...


OpenOn = Callable[[ServedModel, Caller], Awaitable[Generation]]
"""Begins the answers to a request on a version, on behalf of a caller. Raises `ApiError`."""


@dataclass(kw_only=True)
class Exchange:
    """A request that has been read, while it is answered. What became of it is reported once. `context`: of the task
    that has read it; a stream may end in another one.
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
        """Until the answers are open: only an error ends the exchange here."""
        try:
            yield
        except BaseException as error:
            self._end(_status_of(error))
            raise

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While the answers arrive."""
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
        if self.observers:
            finished = self._finished(status)
            for observer in self.observers:
                observer.ended(self, finished)

    def _finished(self, status: int) -> FinishedRequest:
        generation = self.generation
        answers = generation.answers if generation else []
        first_token = generation.first_token if generation else 0.0
        elapsed_s = time.perf_counter() - self._started
        tokenizer = self.model.tokenizer
        return FinishedRequest(
            id=generation.answer_id if generation else f"refused-{secrets.token_hex(12)}",
            time=self.started_at,
            subject=self.subject,
            route=self.route,
            model=self.asked.model,
            version=generation.version if generation else self.model.fingerprint,
            assignment=self.assignment,
            prompt=_joined(self.asked.texts() or [tokenizer.decode(answer.prompt.ids) for answer in answers]),
            answer=_joined([answer.new_text for answer in answers]),
            prompt_tokens=generation.num_prompt_tokens if generation else 0,
            completion_tokens=generation.num_completion_tokens if generation else 0,
            finish_reason=",".join(dict.fromkeys(a.finish_reason for a in answers if a.finish_reason)),
            status=status,
            ttft_s=first_token - self._started if first_token else None,
            latency_s=elapsed_s if status == 200 else None,
        )


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(texts)


def _status_of(error: BaseException) -> int:
    if isinstance(error, ApiError):
        return error.status
    return 500 if isinstance(error, Exception) else CLIENT_LEFT  # a task or a generator that is no longer wanted
