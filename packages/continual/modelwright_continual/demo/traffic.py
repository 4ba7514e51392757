"""Synthetic users of the demonstration: sessions that query a real server over HTTP, through the official client."""

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

MOST_ASKED = 4
"""Maximum number of requests in a session."""
_TOKENS = 8


@dataclass
class DemoTraffic:
    """Runs sessions on `num_threads` threads, one after another on each, until the `with` block ends.

    prompts: by task; shares: shares of the sessions by task, which may be changed while it runs.
    """

    url: str
    key: str = field(repr=False)
    prompts: Mapping[str, Sequence[str]]
    shares: dict[str, float]
    num_threads: int = 2
    pause_s: float = 0.05
    num_answered: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._changed = threading.Lock()
        self._num_sessions = 0
        self._threads = [threading.Thread(target=self._users) for _ in range(self.num_threads)]

    def __enter__(self) -> "DemoTraffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _users(self) -> None:
        from openai import OpenAI

        # Without retries, which would hide failed requests.
        with OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=60) as client:
            model = client.models.list().data[0].id
            while not self._over.is_set():
                with self._changed:
                    number, self._num_sessions = self._num_sessions, self._num_sessions + 1
                self._session(client, model, number)

    def _session(self, client, model: str, number: int) -> None:
        """Sends one user's requests, about one task. Failures are recorded: the demonstration promises to have
        none.
        """
        from openai import OpenAIError

        dice = random.Random(f"session {number}")
        task = dice.choices(list(self.shares), weights=list(self.shares.values()))[0]
        for _ in range(dice.randint(1, MOST_ASKED)):
            if self._over.wait(self.pause_s):
                return
            metadata = {"metadata": {"session_id": f"{self.url}/{number}"}}
            try:
                client.completions.create(
                    model=model,
                    prompt=dice.choice(self.prompts[task]),
                    max_tokens=_TOKENS,
                    temperature=0.0,
                    extra_body=metadata,
                )
            except OpenAIError as error:
                with self._changed:
                    self.failures.append(str(error))
                continue
            with self._changed:
                self.num_answered += 1
