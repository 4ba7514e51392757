"""The parameters of one request, the images of its prompt, and the state of its sequence.

An image is encoded alone and once, when a chunk of its prompt needs it: its bits depend on no other request, and an
image whose keys and values are in the cache is not encoded at all.

Legend: V vocabulary, C colors, S pixels of a side, P patches, D model width.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelwright.core.config import ConfigError, derive_seed
from modelwright.model.decoder import Decoder
from modelwright.model.vision.llava import ImagePrefix, image_prefix

MAX_TEMPERATURE = 2.0
"""Limit of OpenAI's API; above it the tokens are close to random."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. `max_tokens`: most new tokens. `temperature`: 0 is greedy. `top_k`: 0 keeps
    all. `top_p`: smallest set of tokens with at least this mass (nucleus sampling, Holtzman et al. 2020). `min_p`:
    smallest probability of a token, as a share of the likeliest token's (Nguyen et al. 2024). `seed`: all randomness of
    the request. `stop_ids`: tokens that end it; they are not chosen before `min_tokens` tokens. `num_logprobs`: how
    many likeliest alternatives to report next to each token's own log-probability; `num_prompt_logprobs`: the same for
    the tokens of the prompt, None for no log-probabilities of the prompt; `prompt_logprobs_start`: the first token of
    the prompt that is scored, so that what comes before may be taken from the cache. `logit_bias`: (token, number added
    to its logit). Presence and frequency penalty are subtracted from the logits of tokens generated before, once and
    once per occurrence. `repetition_penalty` divides the positive logits of all tokens so far, prompt included, and
    multiplies the negative ones (CTRL, Keskar et al. 2019).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_logprobs: int = 0
    num_prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens: must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ConfigError(
                f"temperature: must be between 0 (greedy) and {MAX_TEMPERATURE:g}, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p: must be between 0 (all tokens) and 1, got {self.min_p}")
        if self.top_k < 0 or self.num_logprobs < 0 or (self.num_prompt_logprobs or 0) < 0:
            raise ConfigError("top_k, num_logprobs, num_prompt_logprobs: must not be negative; 0 disables them")
        if self.prompt_logprobs_start < 1:
            raise ConfigError(
                f"prompt_logprobs_start: must be at least 1, because nothing predicts the first token, got "
                f"{self.prompt_logprobs_start}"
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"min_tokens: must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if not self.repetition_penalty > 0:
            raise ConfigError(f"repetition_penalty: must be above 0 (1 for none), got {self.repetition_penalty}")
        if not (-100 <= self.presence_penalty <= 100 and -100 <= self.frequency_penalty <= 100):
            raise ConfigError("presence_penalty, frequency_penalty: must be between -100 and 100")

    def uniform(self, step: int) -> float:
        """The random number in [0, 1) that chooses new token number `step`; a function of the seed alone."""
        # 53 bits, the mantissa of a double: all quotients are exact and below 1.
        return (derive_seed(self.seed, "token", step) >> 10) / (1 << 53)


Pooling = Literal["", "last", "mean", "score"]
"""Output of a request other than new tokens: the last token's hidden state, the mean over all tokens, or the scalar
head at the last token; "" for new tokens."""


@dataclass(frozen=True)
class ScoredToken:
    """A token of a prompt: its log-probability given the tokens before it, its rank (1 is the likeliest token), and the
    likeliest tokens at its place.
    """

    token_id: int
    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...] = ()


class TokenConstraint(Protocol):
    """Rule, such as a grammar, for the tokens that may come next. One constraint belongs to one sequence."""

    def allowed(self) -> Tensor:
        """Boolean [V]: the tokens that may come next; at least one is true. Raises `ConfigError` if no token may
        follow, which ends the sequence with an error."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance the constraint by the chosen token, which was an allowed one."""
        ...


Pixels = NDArray[np.uint8]
"""An image as a square of the size that the model reads, [C, S, S]."""


@dataclass(eq=False)
class PromptImage:
    """An image whose tokens are those from `start` to `end` of a prompt. digest: SHA-256 of its pixels; embeddings_PD:
    computed when first needed, else None.
    """

    start: int
    end: int
    pixels_CSS: Tensor
    digest: bytes
    embeddings_PD: Tensor | None = None

    def embeddings(self, prefix: ImagePrefix) -> Tensor:
        """Embeddings that replace those of the image's tokens, [P, D]; computed once."""
        if self.embeddings_PD is None:
            self.embeddings_PD = torch.as_tensor(prefix(self.pixels_CSS[None])[0])
        return self.embeddings_PD

    def has_tokens_in(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


LONGEST_MATCH = 4
SHORTEST_MATCH = 2
"""Lengths of the last tokens that are looked up, the longest match first. One token alone recurs too often to say what
follows."""


@dataclass
class NgramIndex:
    """Index of the places where each run of `SHORTEST_MATCH` to `LONGEST_MATCH` tokens was last followed by a token."""

    num_indexed: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The index of the token that followed, by the run before it."""

    def extend(self, token_ids: Ids[int]) -> None:
        """Index the tokens since the last call; token_ids: all of the sequence."""
        for place in range(self.num_indexed, len(token_ids)):
            for length in range(SHORTEST_MATCH, min(LONGEST_MATCH, place) + 1):
                self.places[tuple(token_ids[place - length : place])] = place
        self.num_indexed = len(token_ids)

    def guess(self, token_ids: Ids[int], count: int) -> list[int]:
        """Returns `count` tokens that may come next, none if the last tokens have not occurred before. A match that
        reaches the end continues with the guesses themselves, as repeating text does.
        """
        for length in range(min(LONGEST_MATCH, len(token_ids)), SHORTEST_MATCH - 1, -1):
            # The longest match wins: it predicts best.
            start = self.places.get(tuple(token_ids[len(token_ids) - length :]))
            if start is not None:
                guesses = list(token_ids[start : start + count])
                while len(guesses) < count:
                    guesses.append(guesses[len(guesses) - (len(token_ids) - start)])
                return guesses
        return []


@dataclass(eq=False)
class Sequence:
    """A request in progress: all its tokens, and the number of them in the cache. num_prefill: number of first tokens
    that are computed in chunks: the prompt, and all tokens so far once the sequence was restarted. constraint: None
    lets every token follow; pooling: output to compute instead of tokens; cache_salt: only sequences with the same salt
    share cached prompts; adapter: number of the adapter to compute with, 0 for the model itself; images: those of the
    prompt, in order.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    num_prefill: int = 0
    constraint: TokenConstraint | None = None
    pooling: Pooling = ""
    cache_salt: str = ""
    num_hit_tokens: int = 0
    """Tokens of the prompt that were in the cache when the sequence was first started."""
    was_started: bool = False
    leader: "Sequence | None" = None
    """Running sequence that computes the same prompt for this one, too; None when it computes its own."""
    block_hashes: list[bytes] = field(default_factory=list)
    hashed_len: int = 0
    """Value of `num_prefill` for which `block_hashes` were computed."""
    adapter: int = 0
    images: tuple[PromptImage, ...] = ()
    hidden_sum_D: Tensor | None = None
    """FP64 sum of the hidden states of the prompt so far, for the pooling "mean"."""
    draft: list[int] = field(default_factory=list)
    """Guesses of the next tokens that the present step verifies (`PromptLookup`)."""
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    prompt_scores: list[ScoredToken] = field(default_factory=list)
    """Scores, if requested, of the prompt's tokens from `prompt_logprobs_start` on that are computed so far."""

    def __post_init__(self) -> None:
        self.num_prefill = self.num_prompt

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_cacheable(self) -> int:
        """Number of first tokens of the prompt whose hidden states are not needed, so that they may come from the
        cache. The last token's hidden state is always needed.
        """
        if self.pooling == "mean":
            return 0
        first_scored = self.params.prompt_logprobs_start if self.wants_prompt_scores else self.num_prefill
        return min(first_scored, self.num_prefill) - 1

    def token_at(self, position: int) -> int:
        """A token of the sequence, or of the draft that follows it."""
        known = len(self.token_ids)
        return self.token_ids[position] if position < known else self.draft[position - known]

    @property
    def wants_prompt_scores(self) -> bool:
        """True while log-probabilities of the prompt are requested and not reported yet."""
        return self.params.num_prompt_logprobs is not None and self.num_new == 0

    def has_same_prompt(self, other: "Sequence") -> bool:
        """True if both have the same tokens and images to compute in chunks, so that one computation serves both."""
        return (
            self.cache_salt == other.cache_salt
            and self.adapter == other.adapter
            and [one.digest for one in self.images] == [one.digest for one in other.images]
            and self.num_prefill == other.num_prefill
            and self.token_ids[: self.num_prefill] == other.token_ids[: other.num_prefill]
        )

    @property
    def is_replaying(self) -> bool:
        """True while tokens generated before a preemption are recomputed into the cache."""
        return self.num_cached + 1 < len(self.token_ids)

    def append(self, token_id: int) -> str:
        """Append a new token; returns why the sequence is finished ("stop", "length"), or "" if it is not."""
        self.token_ids.append(token_id)
        self.counts[token_id] += 1
        if self.constraint is not None:
            self.constraint.advance(token_id)
        if token_id in self.params.stop_ids:
            return "stop"
        return "length" if self.num_new >= self.params.max_tokens else ""


@dataclass(frozen=True)
class DecodeRow:
    """Token that is computed as a row of its own: the newest of a sequence, or one of its prompt or its draft."""

    sequence: Sequence
    position: int


def prompt_images(model: Decoder, prompt_ids: Ids[int], images: Ids[Pixels]) -> tuple[PromptImage, ...]:
    """Returns the images of a prompt, in the order of their tokens. Raises `ConfigError` if they do not fit the model
    or the image tokens of the prompt.
    """
    prefix = image_prefix(model)
    if prefix is None:
        if images:
            raise ConfigError("images: this model reads text only; leave them out")
        return ()
    tokens, size = prefix.tokens, prefix.tower.config.image_size
    starts = tokens.starts(prompt_ids)
    if len(starts) != len(images):
        raise ConfigError(f"images: the prompt has image tokens for {len(starts)} images, and {len(images)} were given")
    if any(image.shape != (3, size, size) for image in images):
        raise ConfigError(f"images: each must have 3 colors of {size} x {size} pixels")
    device = model.norm.weight.device
    return tuple(
        PromptImage(
            start,
            start + tokens.num_patches,
            torch.from_numpy(np.ascontiguousarray(image)).to(device),
            hashlib.sha256(image.tobytes()).digest(),
        )
        for start, image in zip(starts, images, strict=True)
    )
