"""Decodes token ids to text, one at a time: a client never receives half a character."""

import codecs
from collections.abc import Mapping
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream


class TextStream(Protocol):
    """An incremental decoder: the joined texts of all steps and of `finish` are the text of all ids."""

    def step(self, token_id: int) -> str:
        """Returns the text that this id completes; may be empty. Raises `ValueError` for an unknown id."""
        ...

    def finish(self) -> str:
        """Returns the rest: a replacement character if the ids end within a character."""
        ...


class ByteStream:
    """Decoder of byte-level vocabularies. token_bytes: by id; added: texts of added tokens, which are plain text."""

    def __init__(self, token_bytes: Mapping[int, bytes], added: Mapping[int, str]) -> None:
        self._bytes = token_bytes
        self._added = added
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        if token_id in self._added:
            text = self._added[token_id]
            return self.finish() + text if text else ""
        if token_id not in self._bytes:
            raise ValueError(f"token id {token_id} is not in the vocabulary")
        return self._decoder.decode(self._bytes[token_id])

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()  # an added token in the midst of a stream calls this, too
        return text


class LibraryStream:
    """Decoder of any other vocabulary, by `tokenizers`' own stream decoder."""

    def __init__(self, library: tokenizers.Tokenizer, skip_special: bool) -> None:
        self._library = library
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._text = ""

    def step(self, token_id: int) -> str:
        if self._library.id_to_token(token_id) is None:
            raise ValueError(f"token id {token_id} is not in the vocabulary")
        self._ids.append(token_id)
        text = self._stream.step(self._library, token_id) or ""
        self._text += text
        return text

    def finish(self) -> str:
        # The library's stream holds back an incomplete character; a decoder that rewrites earlier text has no rest.
        whole = self._library.decode(self._ids, skip_special_tokens=self._skip_special)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""
