"""Settings of the server."""

from dataclasses import dataclass, field

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.core.errors import ConfigError
from modelwright.infer.engine import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of the server.

    `port`: 0 takes a free one. `max_queue`: answers that may wait beyond the `engine.max_running` being computed; more
    are refused with 429. `max_choices`: answers one request may ask for (`n` times the number of prompts).
    `max_body_bytes`: larger request bodies are refused with 413, and so are those that are too large for the model's
    context (`limits.py`). `drain_timeout_s`: on SIGTERM, how long running
    answers may go on. `api_key_env`: name of an environment variable with the key that clients must send; the key
    itself stands in no config file. Empty: no key is asked for.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_queue: int = 128
    max_choices: int = 16
    max_body_bytes: int = 4_000_000
    body_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    api_key_env: str = ""
    engine: EngineConfig = field(default_factory=EngineConfig)
    int8: Int8WeightsConfig = field(default_factory=Int8WeightsConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port: must be between 0 (any free one) and 65535, got {self.port}")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue: must not be negative, got {self.max_queue}")
        for name in ("max_choices", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("body_timeout_s", "drain_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")
