"""API keys: who may do what, and how much of it.

A key file holds the SHA-256 of each key, never a key. That is enough for keys with 256 random bits, as `new_key` makes
them: there is nothing to guess, so a slow or salted hash would protect nothing. `python -m modelwright.serve.keys NAME`
makes a key and prints its entry for the file.
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

from modelwright.core.config import load_yaml, parse
from modelwright.core.errors import ConfigError
from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import ApiError, limit_reached

KeyScope = Literal["infer", "feedback", "admin", "metrics"]
"""What a key may do."""
ALL_SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)

PERIOD_S = 60.0


@dataclass(frozen=True, kw_only=True)
class KeyEntry:
    """One key of a key file."""

    name: str
    """What logs and metrics call the key."""
    sha256: str
    """SHA-256 of the key, 64 hex digits."""
    scopes: tuple[KeyScope, ...] = ("infer",)
    """What the key may do."""
    requests_per_minute: int = 0
    """0 means no limit."""
    tokens_per_minute: int = 0
    """Tokens of prompts and answers; 0 means no limit."""
    max_concurrent: int = 0
    """Answers at once; 0 means no limit."""

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
    """The keys."""

    def __post_init__(self) -> None:
        for kind in ("name", "sha256"):
            values = [getattr(entry, kind) for entry in self.keys]
            if len(set(values)) < len(values):
                raise ConfigError(f"keys: two entries have the same {kind}; remove one")


class TokenBucket:
    """Allows `per_minute` units a minute, and as many at once; 0 allows any number."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = float(per_minute)
        self._clock = clock
        self._level, self._updated = self._capacity, clock()

    def take(self, amount: float) -> float:
        """Take an amount; returns 0, or the seconds until it would be there, with nothing taken. What can never be
        there at once is taken when the bucket is full.
        """
        if not self._capacity:
            return 0.0
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._updated) * self._capacity / PERIOD_S)
        self._updated = now
        missing = min(amount, self._capacity) - self._level
        if missing > 1e-9:
            return missing * PERIOD_S / self._capacity
        self._level -= amount
        return 0.0

    def give_back(self, amount: float) -> None:
        self._level = min(self._capacity, self._level + amount)


class Caller:
    """A key in use: its limits' state is shared by all its requests. Belongs to the event loop."""

    def __init__(self, entry: KeyEntry) -> None:
        self.name = entry.name
        self.scopes = frozenset(entry.scopes)
        self.salt = entry.sha256[:16]
        self._max_concurrent = entry.max_concurrent
        self._num_open = 0
        self._requests = TokenBucket(entry.requests_per_minute)
        self._tokens = TokenBucket(entry.tokens_per_minute)

    def require_scope(self, scope: KeyScope) -> None:
        """Raises `ApiError` 403."""
        if scope not in self.scopes:
            text = f"This API key may not do this: it lacks the scope {scope!r}."
            raise ApiError(403, text, code="insufficient_scope")

    def count_request(self) -> None:
        """Raises `ApiError` 429 when the requests of this minute are used up."""
        wait_s = self._requests.take(1)
        if wait_s:
            raise limit_reached("The requests per minute of this API key are used up.", wait_s)

    def reserve(self, num_answers: int, num_tokens: int, *, typical_answer_s: float) -> "Reservation":
        """Room for answers with so many tokens at most. Raises `ApiError` 429 if the key has no room for them now.
        typical_answer_s: how long answers take, from which the time to wait for a free place is estimated.
        """
        if self._max_concurrent and self._num_open + num_answers > self._max_concurrent:
            text = f"This API key may have {self._max_concurrent} answers at once, and {self._num_open} are open."
            raise limit_reached(text, typical_answer_s)
        wait_s = self._tokens.take(num_tokens)
        if wait_s:
            raise limit_reached("The tokens per minute of this API key are used up.", wait_s)
        self._num_open += num_answers
        return Reservation(self, num_answers, num_tokens)

    def settle(self, num_answers: int, num_unused_tokens: int) -> None:
        self._num_open -= num_answers
        self._tokens.give_back(num_unused_tokens)


@dataclass
class Reservation:
    """Room that a request holds until it is settled."""

    caller: Caller
    num_answers: int
    num_tokens: int

    def settle(self, num_used_tokens: int) -> None:
        """Free the places, and give back the tokens that were not used."""
        self.caller.settle(self.num_answers, max(0, self.num_tokens - num_used_tokens))
        self.num_answers = self.num_tokens = 0


ANYONE = KeyEntry(name="anonymous", sha256="0" * 64, scopes=("infer", "feedback", "metrics"))
"""Who calls a server that asks for no key: all but administration."""


@dataclass
class KeyRing:
    """All keys of a server, by their hash; empty for one that asks for none."""

    callers: Mapping[str, Caller]
    has_scopes: bool = False
    """Whether the keys come from a key file, so that routes open to anyone otherwise (/metrics) ask for a scope."""
    anyone: Caller = field(default_factory=lambda: Caller(ANYONE))

    def caller(self, authorization: str) -> Caller:
        """Who sends this Authorization header. Raises `ApiError` 401."""
        if not self.callers:
            return self.anyone
        scheme, _, key = authorization.partition(" ")
        hashed = key_hash(key.strip())
        known = [caller for other, caller in self.callers.items() if hmac.compare_digest(hashed, other)]
        if scheme.lower() != "bearer" or not known:
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "Missing or wrong API key.", code="invalid_api_key", headers=headers)
        return known[0]


def key_ring(config: ServeConfig) -> KeyRing:
    """The keys of the configured file and of the configured environment variable, which may do everything. Raises
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


def new_key() -> str:
    """A key with 256 random bits."""
    return f"mw-{secrets.token_urlsafe(32)}"


def load_keys(path: Path) -> list[KeyEntry]:
    """The entries of a key file. Raises `ConfigError` that names the file."""
    try:
        return list(parse(KeyFile, load_yaml(path)).keys)
    except ConfigError as error:
        raise ConfigError(f"keys_file: {error}" if str(path) in str(error) else f"keys_file: {path}: {error}") from None


def main(words: Sequence[str] | None = None) -> None:
    """`python -m modelwright.serve.keys`; words: of the command line, None for those of this process."""
    text = "Print a new key on standard error, and its entry for a key file on standard output."
    parser = argparse.ArgumentParser(prog="python -m modelwright.serve.keys", description=text)
    parser.add_argument("name", help="what logs and metrics call the key")
    parser.add_argument("--scopes", nargs="+", default=["infer"], choices=ALL_SCOPES)
    options = parser.parse_args(words)
    key = new_key()
    sys.stderr.write(f"The key, shown this once: {key}\n")
    entry = {"name": options.name, "sha256": key_hash(key), "scopes": options.scopes}
    sys.stdout.write(yaml.safe_dump([entry], sort_keys=False))


if __name__ == "__main__":
    main()
