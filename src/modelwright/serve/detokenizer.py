"""Tokens to text as they arrive: whole characters only, and nothing past a stop string."""

from dataclasses import dataclass, field

from modelwright.data.tokenizer.stream_decode import TextStream


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability, likeliest alternatives and offset in the text of the answer. The first token of
    an echoed prompt follows nothing, so its log-probability is None.
    """

    token_id: int
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Delta:
    """Final text, the tokens that belong to it, and the finish reason ("" while the answer continues)."""

    text: str
    tokens: tuple[TokenInfo, ...] = ()
    finish_reason: str = ""


@dataclass
class IncrementalDetokenizer:
    """Assembles one answer. `stop_texts` end it; neither they nor the text after them is shown. The text of the first
    `min_tokens` tokens is not searched for them, as in vLLM. num_shown: characters shown so far, those of an echoed
    prompt included.
    """

    stream: TextStream
    stop_texts: tuple[str, ...] = ()
    num_shown: int = 0
    min_tokens: int = 0
    _num_tokens: int = 0
    _held: str = ""
    _pending: list[TokenInfo] = field(default_factory=list)

    def info(self, token_id: int, logprob: float, alternatives: tuple[tuple[int, float], ...]) -> TokenInfo:
        """The next token, at its place in the text."""
        return TokenInfo(token_id, logprob, alternatives, self.num_shown + len(self._held))

    def push(self, token_id: int, logprob: float, alternatives: tuple[tuple[int, float], ...]) -> Delta:
        """Add a token; the piece has `finish_reason` "stop" if it completes a stop string."""
        self._pending.append(self.info(token_id, logprob, alternatives))
        self._held += self._step(token_id)
        self._num_tokens += 1
        if self._num_tokens <= self.min_tokens:
            return self._release(len(self._held), "")
        cut = self._find_stop()
        if cut >= 0:
            self._held = self._held[:cut]
            return self._release(len(self._held), "stop")
        return self._release(len(self._held) - self._num_doubtful(), "")

    def finish(self, reason: str) -> Delta:
        """The rest of the text when the engine has ended the answer."""
        self._held += self.stream.finish()
        cut = self._find_stop()
        self._held = self._held[:cut] if cut >= 0 else self._held
        return self._release(len(self._held), "stop" if cut >= 0 else reason)

    def _step(self, token_id: int) -> str:
        """Text of a token; a model may have more tokens than its tokenizer, which have no text."""
        try:
            return self.stream.step(token_id)
        except ValueError:
            return ""

    def _find_stop(self) -> int:
        places = [place for place in (self._held.find(text) for text in self.stop_texts) if place >= 0]
        return min(places, default=-1)

    def _num_doubtful(self) -> int:
        """Length of the longest suffix that may be the beginning of a stop string."""
        longest = max((len(text) - 1 for text in self.stop_texts), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self.stop_texts):
                return length
        return 0

    def _release(self, length: int, reason: str) -> Delta:
        text, self._held = self._held[:length], self._held[length:]
        self.num_shown += length
        ready = [info for info in self._pending if info.offset < self.num_shown]
        self._pending = [info for info in self._pending if info.offset >= self.num_shown]
        return Delta(text, tuple(ready), reason)
