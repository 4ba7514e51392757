"""The replies that are not OpenAI's, as schemas for /openapi.json."""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong: `param` names the field of the request, `code` is stable and meant for programs."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every reply with a status of 400 or more, and the last event of a stream that failed."""

    error: ErrorDetail


class HealthReply(BaseModel):
    """The state of the server."""

    status: Literal["ok", "starting", "draining", "failed"]
    model: str
    open_answers: int


class LiveReply(BaseModel):
    """The server needs no restart."""

    status: Literal["alive"]


class ReadyReply(BaseModel):
    """The server takes requests. `version`: of the weights that answer new ones."""

    status: Literal["ready"]
    model: str
    version: str


class ReloadReply(BaseModel):
    """Which version new requests get from now on, and which one they got before."""

    status: Literal["reloaded"]
    version: str
    previous_version: str


class FeedbackReply(BaseModel):
    """The feedback is committed."""

    status: Literal["recorded"]
    id: str


class ExperimentReply(BaseModel):
    """An A/B test (docs/ab-tests.md). Bounds of intervals are null where they are infinite."""

    name: str
    mode: Literal["split", "shadow"]
    unit: Literal["session", "user"]
    share: float
    status: Literal["running", "rolled_back", "ended", "promoted", "interrupted"]
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
    """All tests, the newest first. `is_on`: whether the server keeps the state of tests."""

    is_on: bool
    tests: list[ExperimentReply]


class ModelReply(BaseModel):
    """A name of the model. `root`, `stage` and `digest` are absent for a model that came from no folder."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    description: str
    root: str = ""
    stage: str = ""
    digest: str = ""


class ModelListReply(BaseModel):
    """All names of the model."""

    object: Literal["list"]
    data: list[ModelReply]


class TokenizeReply(BaseModel):
    """Token ids of a text or conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class DetokenizeReply(BaseModel):
    """Text of token ids."""

    prompt: str
