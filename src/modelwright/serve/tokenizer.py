"""The server's tokenizer, with errors in the server's form, and tokens to text as they arrive.

What a person writes never becomes a control token: `<|end|>` in a message is encoded as ordinary characters. Only the
chat template's own text is read with control tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.core.errors import DataError
from modelwright.data.tokenizer.fast_bpe import is_byte_level, token_bytes
from modelwright.data.tokenizer.stream_decode import TextStream
from modelwright.data.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer
from modelwright.serve.errors import ApiError


class ServedTokenizer:
    """A tokenizer for serving. `bytes_of`: the bytes of each token of a byte-level vocabulary, else empty.
    `definition`: the text of its `tokenizer.json`.

    `stop_ids`: tokens that end an answer and are never shown. `max_token_bytes`: the most text one token represents, 0
    if unbounded (the tokenizer changes the text first, or has a token for any unknown word). Safe to use from several
    threads.
    """

    def __init__(
        self, tokenizer: Tokenizer, bytes_of: Mapping[int, bytes], definition: str, *, normalizes: bool = False
    ) -> None:
        self.definition = definition
        self._tokenizer = tokenizer
        self._bytes_of = bytes_of
        self.max_token_bytes = 0 if normalizes else max(map(len, bytes_of.values()), default=0)
        control = [tokenizer.id_of(token) for token in SPECIAL_TOKENS]
        self.stop_ids = tuple(sorted({*tokenizer.stop_ids, *(token for token in control if token is not None)}))

    @classmethod
    def load(cls, folder: Path) -> "ServedTokenizer":
        """Read a tokenizer folder. Raises `ArtifactError` if it cannot be read."""
        tokenizer = Tokenizer.load(folder)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        definition = json.loads(text)
        bytes_of = token_bytes(definition) if is_byte_level(definition) else {}
        return cls(tokenizer, bytes_of, text, normalizes=bool(definition.get("normalizer")))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, text: str, *, with_begin: bool = True) -> list[int]:
        """A prompt for plain completion, starting like documents in training, with the begin token if there is one."""
        begin = [self._tokenizer.bos_id] if with_begin and self._tokenizer.bos_id is not None else []
        return begin + self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, image_text: str = "") -> list[int]:
        """A conversation up to where the assistant's turn begins. image_text: what stands for an image. Raises
        `ApiError` 400 if the template rejects it.
        """
        try:
            return self._tokenizer.encode_prompt(messages, image_text=image_text)
        except DataError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from None

    def encode_answer(self, question: str, answer: str) -> list[int]:
        """A conversation of one question and its answer, up to the token with which the answer ends. Raises like
        `encode_chat`.
        """
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            ids, mask = self._tokenizer.encode_chat(turns)
        except DataError as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        spoken = mask.nonzero()[0]
        return ids[: int(spoken[-1]) + 1 if len(spoken) else len(ids)].tolist()

    def stream(self) -> TextStream:
        """A decoder that takes one token at a time, returns whole characters only and omits control tokens."""
        return self._tokenizer.stream()

    def decode(self, ids: Sequence[int]) -> str:
        """Text without control tokens."""
        return self._tokenizer.decode(ids)

    def token_text(self, token_id: int) -> str:
        """One token as text, control tokens by name; "" for one beyond the vocabulary (the model may have more)."""
        return self._tokenizer.token_text(token_id) if token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """One token as bytes: exact for byte-level vocabularies, else its text in UTF-8."""
        return self._bytes_of.get(token_id) or self.token_text(token_id).encode("utf-8")


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
