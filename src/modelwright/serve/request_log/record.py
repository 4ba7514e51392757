"""One record of the log, as it is exported. docs/serving.md describes the fields for other programs."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from modelwright.data.sources.records import OWN_AUTHOR


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """A request with its answer and the feedback on it."""

    id: str
    """The answer's id, as the client got it."""
    time: float
    """Unix seconds."""
    session: str
    """A pseudonym, as is `user`: HMAC-SHA-256 with the salt of the log."""
    user: str
    route: str
    """"chat" or "completion"."""
    model: str
    version: str
    """The version of the weights, those of the adapter included."""
    arm: str
    """The arm of an A/B test; "" without one."""
    prompt: str
    answer: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    status: int
    ttft_s: float | None
    latency_s: float | None
    feedback_score: float | None = None
    feedback_label: str | None = None
    feedback_text: str | None = None
    answer_by: str = OWN_AUTHOR
    """Marks our own answers, which `data/sources/sources.py` refuses as training text."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


FIELDS = tuple(field.name for field in fields(RequestRecord))
