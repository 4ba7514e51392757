"""API keys, their scopes and their limits.

A key file holds the SHA-256 of each key, never a key. `python -m modelwright.serve.keys NAME` creates a key and prints
its entry for the file. Its keys have 256 random bits, which cannot be guessed, so a slow or salted hash would add no
protection.
"""

import argparse
import hashlib
import hmac
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import yaml

from modelwright.core.config import ConfigError, load_yaml, parse
from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import ApiError, limit_reached

KeyScope = Literal["infer", "feedback", "admin", "metrics"]
"""Permission of a key."""
ALL_SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)

PERIOD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class KeyEntry:
    """An entry of a key file."""

    name: str
    """Name of the key in logs and metrics."""
    sha256: str
    """SHA-256 of the key, 64 hex digits."""
    scopes: tuple[KeyScope, ...] = ("infer",)
    """Permissions of the key."""
    requests_per_minute: int = 0
    """Most requests per minute; 0 means no limit."""
    tokens_per_minute: int = 0
    """Most tokens of prompts and answers per minute; 0 means no limit."""
    max_concurrent: int = 0
    """Most answers at once; 0 means no limit."""

    def __post_init__(self) -> None:
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise ConfigError("sha256: must be 64 hex digits; make an entry with python -m modelwright.serve.keys NAME")
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative (0 means no limit), got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class KeyFile:
    """The contents of a key file."""

    keys: tuple[KeyEntry, ...]
    """Entries of the keys."""

    def __post_init__(self) -> None:
        for kind in ("name", "sha256"):
            values = [getattr(entry, kind) for entry in self.keys]
            if len(set(values)) < len(values):
                raise ConfigError(f"keys: two entries have the same {kind}; remove one")


class TokenBucket:
    """Allows `per_minute` units a minute, also all at once; 0 means no limit."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = float(per_minute)
        self._clock = clock
        self._level, self._updated = self._capacity, clock()

    def take(self, amount: float) -> float:
        """Takes an amount and returns 0, or takes nothing and returns the seconds until it would be available."""
        if not self._capacity:
            return 0.0
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._updated) * self._capacity / PERIOD_S)
        self._updated = now
        # more than the capacity would never be available, so a full bucket allows it and goes below zero
        missing = min(amount, self._capacity) - self._level
        if missing > 1e-9:  # of rounding errors of the level
            return missing * PERIOD_S / self._capacity
        self._level -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        self._level = min(self._capacity, self._level + amount)


class Caller:
    """A key in use. Its requests share the state of its limits. Belongs to the event loop."""

    def __init__(self, entry: KeyEntry) -> None:
        self.name = entry.name
        self.scopes = frozenset(entry.scopes)
        # separates the prefix caches of keys; a part of the hash, because the key itself must not reach the engines
        self.salt = entry.sha256[:16]
        self._max_concurrent = entry.max_concurrent
        self.num_open = 0
        self._requests = TokenBucket(entry.requests_per_minute)
        self.tokens = TokenBucket(entry.tokens_per_minute)

    def admit(self, scope: KeyScope) -> None:
        """Counts a request. Raises `ApiError` 403 without the scope, 429 if the requests of this minute are used up."""
        if scope not in self.scopes:
            text = f"This API key may not do this: it lacks the scope {scope!r}."
            raise ApiError(403, text, code="insufficient_scope")
        wait_s = self._requests.take(1)
        if wait_s:
            raise limit_reached("The requests per minute of this API key are used up.", wait_s)

    def reserve(self, num_answers: int, num_tokens: int, *, typical_answer_s: float) -> "Reservation":
        """Reserves room for answers with `num_tokens` in all. Raises `ApiError` 429 if they exceed the key's limits
        now. typical_answer_s: duration of an answer, from which the wait for a free place is estimated.
        """
        if self._max_concurrent and self.num_open + num_answers > self._max_concurrent:
            text = f"This API key may have {self._max_concurrent} answers at once, and {self.num_open} are open."
            raise limit_reached(text, typical_answer_s)
        wait_s = self.tokens.take(num_tokens)
        if wait_s:
            raise limit_reached("The tokens per minute of this API key are used up.", wait_s)
        self.num_open += num_answers
        return Reservation(self, num_answers, num_tokens)


@dataclass
class Reservation:
    """Room of a request in the limits of its key."""

    caller: Caller
    num_answers: int
    num_tokens: int

    def settle(self, num_used_tokens: int) -> None:
        """Frees the places, and returns unused tokens to the key. Further calls do nothing."""
        self.caller.num_open -= self.num_answers
        self.caller.tokens.give_back(max(0, self.num_tokens - num_used_tokens))
        self.num_answers = self.num_tokens = 0


ANYONE = KeyEntry(name="anonymous", sha256="0" * 64, scopes=("infer", "feedback", "metrics"))
"""The caller of a server without keys, who may do everything but administration."""


@dataclass
class KeyRing:
    """All keys of a server, by their hash. Empty for a server without keys."""

    callers: Mapping[str, Caller]
    has_scopes: bool = False
    """True if the keys come from a key file, so that also /metrics and the like require a scope."""
    anyone: Caller = field(default_factory=lambda: Caller(ANYONE))

    def caller(self, authorization: str) -> Caller:
        """Returns the sender of an Authorization header. Raises `ApiError` 401."""
        if not self.callers:
            return self.anyone
        scheme, _, key = authorization.partition(" ")
        hashed = key_hash(key.strip())
        # compared with every key, in constant time, so that the time tells nothing about the hashes
        known = [caller for other, caller in self.callers.items() if hmac.compare_digest(hashed, other)]
        if scheme.lower() != "bearer" or not known:
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "Missing or wrong API key.", code="invalid_api_key", headers=headers)
        return known[0]


def key_ring(config: ServeConfig) -> KeyRing:
    """Returns the keys of the configured file, and that of the environment variable, which has all scopes. Raises
    `ConfigError` if the variable is not set or the file cannot be read.
    """
    entries = load_keys(Path(config.keys_file)) if config.keys_file else []
    if config.api_key_env:
        key = os.environ.get(config.api_key_env, "")
        if not key:
            name = config.api_key_env
            raise ConfigError(f"api_key_env: the environment variable {name} is not set; set it or remove the option")
        entries.append(KeyEntry(name=config.api_key_env, sha256=key_hash(key), scopes=ALL_SCOPES))
    return KeyRing({entry.sha256: Caller(entry) for entry in entries}, has_scopes=bool(config.keys_file))


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()


def load_keys(path: Path) -> list[KeyEntry]:
    """Reads the entries of a key file. Raises `ConfigError` that names the file."""
    try:
        return list(parse(KeyFile, load_yaml(path)).keys)
    except ConfigError as error:
        raise ConfigError(f"keys_file: {error}" if str(path) in str(error) else f"keys_file: {path}: {error}") from None


def main(words: Sequence[str] | None = None) -> None:
    """Runs `python -m modelwright.serve.keys`. words: command line, None for that of this process."""
    text = "Print a new key on standard error, and its entry for a key file on standard output."
    parser = argparse.ArgumentParser(prog="python -m modelwright.serve.keys", description=text)
    parser.add_argument("name", help="name of the key in logs and metrics")
    parser.add_argument("--scopes", nargs="+", default=["infer"], choices=ALL_SCOPES)
    options = parser.parse_args(words)
    key = f"mw-{secrets.token_urlsafe(32)}"
    sys.stderr.write(f"The key, shown this once: {key}\n")
    entry = {"name": options.name, "sha256": key_hash(key), "scopes": options.scopes}
    sys.stdout.write(yaml.safe_dump([entry], sort_keys=False))


if __name__ == "__main__":
    main()
