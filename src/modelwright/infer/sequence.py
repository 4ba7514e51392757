"""The parameters of one request and the state of its sequence."""

from collections import Counter
from dataclasses import dataclass, field

from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed

MAX_TEMPERATURE = 2.0
"""As in OpenAI's API; above it the tokens are close to random."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    `max_tokens`: most new tokens. `temperature`: 0 is greedy. `top_k`: 0 keeps all. `top_p`: smallest set of tokens
    with at least this mass (nucleus sampling, Holtzman et al. 2020). `seed`: all randomness of the request. `stop_ids`:
    tokens that end it. `num_logprobs`: how many likeliest alternatives to report beside each token's own
    log-probability. Penalties are subtracted from the logits of tokens generated before: presence once, frequency once
    per occurrence.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    num_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens: must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ConfigError(
                f"temperature: must be between 0 (greedy) and {MAX_TEMPERATURE:g}, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0 or self.num_logprobs < 0:
            raise ConfigError("top_k, num_logprobs: must not be negative; 0 disables them")
        if not (-100 <= self.presence_penalty <= 100 and -100 <= self.frequency_penalty <= 100):
            raise ConfigError("presence_penalty, frequency_penalty: must be between -100 and 100")

    def uniform(self, step: int) -> float:
        """The random number in [0, 1) that chooses new token number `step`; a function of the seed alone."""
        return (derive_seed(self.seed, "token", step) >> 10) / (1 << 53)


@dataclass(eq=False)
class Sequence:
    """A request in progress: all its tokens, and how many of them the cache holds."""

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    counts: Counter[int] = field(default_factory=Counter)

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def in_prefill(self) -> bool:
        """Whether part of the prompt is not in the cache yet."""
        return self.num_cached < self.num_prompt

    @property
    def is_replaying(self) -> bool:
        """Whether tokens generated before a preemption are still being recomputed into the cache."""
        return self.num_cached + 1 < len(self.token_ids)

    def append(self, token_id: int) -> str:
        """Append a new token; returns why the sequence is finished ("stop", "length"), or "" if it is not."""
        self.token_ids.append(token_id)
        self.counts[token_id] += 1
        if token_id in self.params.stop_ids:
            return "stop"
        return "length" if self.num_new >= self.params.max_tokens else ""
