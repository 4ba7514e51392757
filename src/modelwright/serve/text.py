"""From tokens to text while they arrive: whole characters only, and nothing past a stop string.

Knows nothing about HTTP and nothing about the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Turns a growing list of token ids into text that never has to be taken back.

    Decodes a short window again at each token, since tokens may be parts of one character and some tokenizers treat the
    first token of a text differently. Text that ends in U+FFFD waits for the rest of the character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, "" while a character is still open."""
        self._ids.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        """What is left, an unfinished character as U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._window : self._shown])
        after = self._decode(self._ids[self._window :])
        if not final and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._window, self._shown = self._shown, len(self._ids)
        return after[len(before) :]


@dataclass(frozen=True)
class TokenInfo:
    """A token of the answer with its log-probability, likeliest alternatives and place in the answer's text."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """Text that is final, the tokens that belong to it, and why the answer is over ("" while it goes on)."""

    text: str
    tokens: tuple[TokenInfo, ...] = ()
    finish_reason: str = ""


@dataclass
class AnswerText:
    """Assembles one answer. `stop_texts` end it; neither they nor what comes after is shown."""

    detokenizer: Detokenizer
    stop_texts: tuple[str, ...] = ()
    _held: str = ""
    _num_shown: int = 0
    _pending: list[TokenInfo] = field(default_factory=list)

    def push(self, token_id: int, logprob: float, alternatives: tuple[tuple[int, float], ...]) -> Piece:
        """Take a token; the piece has `finish_reason` "stop" when it completes a stop string."""
        self._pending.append(TokenInfo(token_id, logprob, alternatives, self._num_shown + len(self._held)))
        self._held += self.detokenizer.push(token_id)
        cut = self._find_stop()
        if cut >= 0:
            self._held = self._held[:cut]
            return self._release(len(self._held), "stop")
        return self._release(len(self._held) - self._num_doubtful(), "")

    def finish(self, reason: str) -> Piece:
        """The rest of the text when the engine has ended the answer."""
        self._held += self.detokenizer.flush()
        cut = self._find_stop()
        self._held = self._held[:cut] if cut >= 0 else self._held
        return self._release(len(self._held), "stop" if cut >= 0 else reason)

    def _find_stop(self) -> int:
        places = [place for place in (self._held.find(text) for text in self.stop_texts) if place >= 0]
        return min(places, default=-1)

    def _num_doubtful(self) -> int:
        """Length of the longest tail that may be the beginning of a stop string."""
        longest = max((len(text) - 1 for text in self.stop_texts), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self.stop_texts):
                return length
        return 0

    def _release(self, length: int, reason: str) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._num_shown += length
        ready = [info for info in self._pending if info.offset < self._num_shown]
        self._pending = [info for info in self._pending if info.offset >= self._num_shown]
        return Piece(text, tuple(ready), reason)
