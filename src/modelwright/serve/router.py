"""Which engine gets a request, and how many requests may be tried again."""

import hashlib
import random
from array import array
from collections.abc import Mapping, Sequence

from modelwright.serve.engine_health import EngineHealth
from modelwright.serve.jobs import Job

RETRY_SHARE = 0.1
"""Retries per request, as in the budgets of Finagle and Envoy: more would turn a fault into an overload."""

MAX_SAVED_RETRIES = 100.0


def cache_salt(job: Job) -> str:
    """Jobs that differ in it share no cached prompts."""
    return f"{job.cache_salt} {job.adapter}"


def prompt_key(prompt_ids: Sequence[int], salt: str, prefill_chunk: int) -> bytes:
    """Equal for prompts that can share the beginning of the prefix cache; salt: differs for those that cannot."""
    return salt.encode() + array("q", prompt_ids[:prefill_chunk]).tobytes()


def choose_engine(loads: Mapping[int, int], key: bytes, tie_tokens: int, draw: random.Random) -> int:
    """One of the engines in `loads`, which has the outstanding tokens of each: the less loaded of two that are drawn
    (power of two choices, Mitzenmacher 2001). When they differ by at most `tie_tokens`, the one to which the key
    belongs by rendezvous hashing, because it may have the prompt in its cache.
    """
    pair = draw.sample(sorted(loads), min(2, len(loads)))
    lightest, heaviest = min(pair, key=loads.__getitem__), max(pair, key=loads.__getitem__)
    if loads[heaviest] - loads[lightest] > tie_tokens:
        return lightest
    return max(pair, key=lambda number: hashlib.sha256(key + b"%d" % number).digest())


class Router:
    """Gives each request an engine that may take it. prefill_chunk: tokens in whose multiples prompts are cached."""

    def __init__(self, health: EngineHealth, prefill_chunk: int) -> None:
        self._health = health
        self._chunk = prefill_chunk
        self._draw = random.Random(0)

    def choose(self, loads: Mapping[int, int], job: Job) -> int:
        """The number of an engine. loads: outstanding tokens of those that run, at least one."""
        if len(loads) == 1:
            return next(iter(loads))
        allowed = {number: loads[number] for number in self._health.candidates(loads)}
        tie_tokens = self._chunk if len(job.prompt_ids) > self._chunk else 0
        return choose_engine(allowed, prompt_key(job.prompt_ids, cache_salt(job), self._chunk), tie_tokens, self._draw)


class RetryBudget:
    """Allows one retry at first, and `RETRY_SHARE` of a retry more with every request."""

    def __init__(self) -> None:
        self._balance = 1.0

    def note_request(self) -> None:
        self._balance = min(MAX_SAVED_RETRIES, self._balance + RETRY_SHARE)

    def take(self) -> bool:
        """Whether one more retry is allowed; it counts then."""
        is_allowed = self._balance >= 1
        self._balance -= is_allowed
        return is_allowed
