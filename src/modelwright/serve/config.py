"""Settings of the server, and of its records of requests: a log, the state of A/B tests, and spans."""

from dataclasses import dataclass, field
from typing import Any, Literal

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.core.config import ConfigError, constant, only_for, word_for_none
from modelwright.infer.engine import EngineConfig

OWN_BACKEND = "modelwright"
ToolParser = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "json", "own"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class PromptImagesConfig:
    """Limits on images in chat requests, for a model that reads images."""

    max_count: int = 4
    """Most images per request."""
    max_bytes: int = 2_000_000
    """Largest image file in bytes. The limit on bodies grows by `max_count` such images, up to `max_body_bytes`."""
    max_pixels: int = 16_000_000
    """Most pixels per image, which are counted before anything is decompressed."""

    def __post_init__(self) -> None:
        for name in ("max_count", "max_bytes", "max_pixels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of the server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    engines: int = 1
    """Number of engines with the model, each in a separate process with its own cache of `engine.kv_cache_tokens`.
    Engines share the cores, are restarted when they end, and take over each other's answers. A single engine leaves one
    core to the server if the model has fewer than 50M parameters; for such a model, one engine per core serves the most
    requests."""
    max_wait_s: float = 600.0
    """Longest wait in seconds before an engine begins with a request, expected by the pace at which the answers before
    it end and by how late the server's event loop is. A request that would wait longer is refused at once with 429, so
    that those that are accepted stay quick in an overload. The default is the time after which OpenAI's clients give
    up."""
    max_queued: int = constant(128)
    """Requests that may wait beyond the `engine.max_num_seqs` that are running in each engine, whatever the pace."""
    max_queued_tokens: int = constant(1_048_576)
    """Most tokens of prompts and of the longest possible answers that all running and waiting requests may have
    together; more are refused with 429."""
    max_completions: int = constant(16)
    """Most completions of one request (`n` times the number of prompts)."""
    max_body_bytes: int = constant(4_000_000)
    """Largest request body in bytes; larger ones are refused with 413. The model's context lowers the limit
    (docs/serving.md)."""
    drain_timeout_s: float = 30.0
    """Seconds that running answers get to finish on SIGTERM."""
    api_key_env: str = ""
    """Name of the environment variable with the key that clients must send, because keys belong in no config file; ""
    requires no key."""
    keys_file: str = ""
    """YAML file with hashes of API keys, their scopes and limits (docs/serving.md); "" for none."""
    tls_certificate: str = ""
    """PEM file with the certificate chain for HTTPS; "" serves plain HTTP."""
    tls_key: str = field(default="", metadata=only_for("tls_certificate"))
    """PEM file with the private key of the certificate."""
    cors_origins: tuple[str, ...] = field(default=(), metadata=word_for_none())
    """Origins (`https://example.com`) whose pages may call the API from a browser."""
    log_format: LogFormat = "text"
    """Lines of the log on standard error; `json` writes an object per line, for programs."""
    log_prompts: bool = False
    """Write the bodies of requests to the log."""
    model_aliases: tuple[str, ...] = field(default=(), metadata=word_for_none())
    """Further names by which clients may call the model, or, as `name=adapter`, an adapter."""
    adapters: dict[str, str] = field(default_factory=dict, metadata={"constant": True})
    """Folders of LoRA adapters of the model, by their names in requests. Not a setting, because adapters belong to the
    served model instead of the run."""
    backend: str = constant(OWN_BACKEND)
    """Back-end that computes the answers: see `BACKENDS` in `engines/backends.py`. Not a setting, because each can
    serve a run's model."""
    mcp: str = constant("")
    """JSON file with the MCP servers whose tools the chat page offers; "" offers none. Not a setting, because the
    programs belong to this machine instead of the run."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    tool_parser: ToolParser = "auto"
    """Form in which the model writes calls of functions; `auto` chooses by the chat template, and a template without a
    place for tools always gets `own`."""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """`think` returns the text between `<think>` and `</think>` as `reasoning_content`; `auto` does so if the chat
    template or the vocabulary has these marks."""
    routes: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Settings of routes of other installed packages (docs/extending.md), by their entry-point names: `{responses:
    {stored: 100}}`."""
    clamp_max_tokens: bool = constant(True)
    """Lower `max_tokens` of chat requests to the room in the context instead of refusing the request."""
    images: PromptImagesConfig = field(default_factory=PromptImagesConfig, metadata={"constant": True})
    """Limits on images in chat requests."""
    body_timeout_s: float = constant(30.0)
    """Seconds in which a request body must arrive."""
    header_timeout_s: float = constant(10.0)
    """Seconds in which a request's headers must arrive, from the opening of the connection or the last answer on."""
    send_timeout_s: float = constant(30.0)
    """Seconds for which a client may leave sent data unread."""
    int8: Int8WeightsConfig = field(default_factory=Int8WeightsConfig)

    @property
    def aliases(self) -> dict[str, str]:
        """Names of adapters by alias."""
        return dict(alias.split("=", 1) for alias in self.model_aliases if "=" in alias)

    @property
    def alias_names(self) -> list[str]:
        return [alias.partition("=")[0] for alias in self.model_aliases]

    def check_names(self, model_name: str) -> None:
        """Raises `ConfigError` if the names of model and adapters conflict."""
        for alias, name in self.aliases.items():
            if name not in self.adapters:
                known = ", ".join(self.adapters) or "there are none"
                raise ConfigError(f"model_aliases: {alias}={name} names no adapter; choose from {known}")
        names = [model_name, *self.alias_names, *self.adapters]
        if len(set(names)) < len(names) or "" in names:
            raise ConfigError(f"model_aliases, adapters: each needs a unique name, got {', '.join(names)}")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port: must be between 0 (any free one) and 65535, got {self.port}")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("tls_certificate, tls_key: HTTPS needs both; give both files or none")
        for name in ("engines", "max_completions", "max_body_bytes", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("max_wait_s", "max_queued", "body_timeout_s", "drain_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class RequestsConfig:
    """Records of requests: a log, the state of A/B tests, and spans. Each is off by default."""

    log: str = ""
    """SQLite file for prompts, answers and feedback, with personal data replaced by markers; a SQLAlchemy URL for other
    databases, or `env:NAME` for an environment variable with either; "" keeps no log."""
    retention_days: float = field(default=30.0, metadata=only_for("log"))
    """Days after which records are deleted."""
    max_per_user: int = field(default=0, metadata=only_for("log"))
    """Most requests of one user that are logged within 24 hours; 0 means no limit. Without keys and the field `user`,
    all requests count as one user's."""
    ab_state: str = ""
    """SQLite file with the state of A/B tests, which continue after a restart, or another database as for `log`; ""
    turns tests off (docs/ab-tests.md). Servers must not share it."""
    traces: str = ""
    """Address of an OpenTelemetry collector for OTLP over HTTP (`http://localhost:4318`), which receives a span per
    request, with texts only if `serve.log_prompts` is set; "" sends no spans."""

    def __post_init__(self) -> None:
        if not self.retention_days > 0:
            raise ConfigError(f"retention_days: must be above 0, got {self.retention_days}")
        if self.max_per_user < 0:
            raise ConfigError(f"max_per_user: must not be negative (0 means no limit), got {self.max_per_user}")
