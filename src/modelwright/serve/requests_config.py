"""Settings of what the server keeps of its requests and reports of them: a log, the state of A/B tests, and spans."""

from dataclasses import dataclass, field

from modelwright.core.config import only_for
from modelwright.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RequestsConfig:
    """What the server keeps of its requests and reports of them; nothing unless a place for it is named."""

    log: str = ""
    """SQLite file for prompts, answers and feedback, with personal data replaced by markers; a SQLAlchemy URL for other
    databases, or `env:NAME` for an environment variable with either; "" keeps no log."""
    retention_days: float = field(default=30.0, metadata=only_for("log"))
    """Records are deleted after so many days."""
    max_per_user: int = field(default=0, metadata=only_for("log"))
    """Requests of one user that are logged within 24 hours; 0 means no limit. Without keys and without the field `user`
    all requests have one user."""
    ab_state: str = ""
    """SQLite file with the state of A/B tests, which go on after a restart, or another database as for `log`; "" allows
    no tests (docs/ab-tests.md). Servers must not share it."""
    traces: str = ""
    """Address of an OpenTelemetry collector that takes OTLP over HTTP (`http://localhost:4318`), for a span of each
    request; texts are in it only with `serve.log_prompts`. "" sends none."""

    def __post_init__(self) -> None:
        if not self.retention_days > 0:
            raise ConfigError(f"retention_days: must be above 0, got {self.retention_days}")
        if self.max_per_user < 0:
            raise ConfigError(f"max_per_user: must not be negative (0 means no limit), got {self.max_per_user}")
