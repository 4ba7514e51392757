"""The server's tokenizer: prompts in, text out, errors in the server's form.

What a person writes never becomes a control token: `<|end|>` in a message is encoded as ordinary characters. Only the
chat template's own text is read with control tokens.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from modelwright.core.errors import DataError
from modelwright.data.tokenizer.fast_bpe import is_byte_level, token_bytes
from modelwright.data.tokenizer.stream_decode import TextStream
from modelwright.data.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer
from modelwright.serve.errors import ApiError


class Codec:
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
    def load(cls, folder: Path) -> "Codec":
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
