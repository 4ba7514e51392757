"""Token ids to text, one id at a time: a client never receives half a character, and the pieces together are what
`tokenizers` decodes from all ids at once.
"""

import codecs
from collections.abc import Collection, Mapping
from typing import Any

import tokenizers


def _alphabet() -> dict[str, int]:
    # GPT-2's alphabet (Radford et al. 2019, `encoder.py`): printable characters are themselves, others follow at 256.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF: Mapping[str, int] = _alphabet()
"""Bytes by the characters that spell them in a byte-level vocabulary."""


def is_byte_level(definition: Mapping[str, Any]) -> bool:
    """Returns True if tokens are spelled in the byte-level alphabet, so that each has fixed bytes."""
    steps = [step["type"] for step in _steps(definition)]
    return "ByteLevel" in steps and set(steps) <= {"ByteLevel", "Fuse"}


def _steps(definition: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the steps of the decoder in a `tokenizer.json`."""
    decoder = definition.get("decoder") or {}
    if decoder.get("type") == "Sequence":
        return [step for one in decoder["decoders"] for step in _steps({"decoder": one})]
    return [decoder] if decoder else []


def token_bytes(definition: Mapping[str, Any]) -> dict[int, bytes]:
    """Returns the bytes of each token of a byte-level vocabulary. As in `tokenizers`, a token with a character outside
    of the alphabet, which only added tokens have, is text in UTF-8.
    """
    tokens = {i: token for token, i in definition["model"]["vocab"].items()}
    tokens |= {entry["id"]: entry["content"] for entry in definition.get("added_tokens", ())}
    return {
        i: bytes(BYTE_OF[c] for c in token) if all(c in BYTE_OF for c in token) else token.encode("utf-8")
        for i, token in tokens.items()
    }


class ByteStream:
    """Decoder of byte-level vocabularies, one id at a time: the joined texts of all steps and of `finish` are the text
    of all ids. token_bytes: by id; skipped: ids without text.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], skipped: Collection[int] = ()) -> None:
        self._bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        """Returns the text that this id completes; may be empty. Raises `ValueError` for an unknown id."""
        if token_id in self._skipped:
            return ""
        if token_id not in self._bytes:
            raise ValueError(f"token id {token_id} is not in the vocabulary")
        return self._decoder.decode(self._bytes[token_id])

    def finish(self) -> str:
        """Returns the rest: a replacement character if the ids end within a character."""
        return self._decoder.decode(b"", final=True)


class LibraryStream:
    """Does `ByteStream` for any other vocabulary, by the decoder of `tokenizers`.

    skipped: tokens without text. An id is decoded after an anchor, a token whose own text is then removed, so that only
    the first id is decoded like the beginning of a text, whose blank may be removed. Ids of single bytes wait for the
    end of their run: one that is no UTF-8 is replaced as a whole, a character for each byte. A decoder that changes a
    token by the one after it (such as the library's decoders of BPE and CTC) gives its text at the end.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, definition: Mapping[str, Any], skipped: Collection[str] = ()
    ) -> None:
        self._library = library
        self._skipped = skipped
        self._has_bytes, self._anchor = False, None
        for step in _steps(definition):
            match step:
                case {"type": "ByteFallback"}:
                    self._has_bytes = True
                case {"type": "Fuse" | "Metaspace" | "WordPiece"} | {"type": "Strip", "start": 0 | 1, "stop": 0}:
                    pass
                case {"type": "Replace", "pattern": {"String": pattern}} if len(pattern) == 1:
                    pass
                case _:
                    break
        else:
            self._anchor = self._find_anchor(definition)
        self._is_first = True
        self._waiting: list[int] = []

    def _find_anchor(self, definition: Mapping[str, Any]) -> int | None:
        """Returns a token of letters, which every decoder leaves as it is; None without any."""
        added = {entry["content"] for entry in definition["added_tokens"]}
        vocab = definition["model"]["vocab"]
        pieces = [piece for piece, _ in vocab] if isinstance(vocab, list) else [*vocab]
        plain = (piece for piece in pieces if piece.isascii() and piece.isalpha() and piece not in added)
        return self._library.token_to_id(next(plain, ""))

    def step(self, token_id: int) -> str:
        """Returns the text that this id completes; may be empty. Raises `ValueError` for an unknown id."""
        token = self._library.id_to_token(token_id)
        if token is None:
            raise ValueError(f"token id {token_id} is not in the vocabulary")
        if token in self._skipped:
            return ""
        if self._anchor is None or (self._has_bytes and len(token) == 6 and token[:3] == "<0x" and token[5] == ">"):
            self._waiting.append(token_id)
            return ""
        return self.finish() + self._decode([token_id])

    def finish(self) -> str:
        """Returns the rest: the ids that wait for others after them."""
        waiting, self._waiting = self._waiting, []
        return self._decode(waiting) if waiting else ""

    def _decode(self, ids: list[int]) -> str:
        if self._is_first or self._anchor is None:
            self._is_first = False
            return self._library.decode(ids, skip_special_tokens=False)
        before = self._library.decode([self._anchor], skip_special_tokens=False)
        return self._library.decode([self._anchor, *ids], skip_special_tokens=False).removeprefix(before)


TextStream = ByteStream | LibraryStream
