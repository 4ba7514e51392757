"""Calls of functions in the text of an answer: the parts that a client receives, and the protocol of their forms."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

TEXT_SHOWN = "content"
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The form of `json.dumps`, for llguidance. With free white space a small model may write blanks up to its limit."""


@dataclass(frozen=True)
class Function:
    """A function that an answer may call. schema: JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]
    is_strict: bool = False


@dataclass(frozen=True)
class CallPart:
    """A part of a call. name: "" after the first part, which has the id; arguments: the next piece of the JSON text."""

    index: int
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TextPart:
    """A piece of text for the field `field` of a message: `content` or `reasoning_content`."""

    field: str
    text: str


Part = CallPart | TextPart


class CallParser(Protocol):
    """Reads one answer piece by piece."""

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        """Returns the parts that `text` makes certain; with `is_last` all that remain. Text that is no call of a known
        function is text, and cutting the answer into other pieces changes nothing but the cuts."""
        ...


class CallForm(Protocol):
    """The form in which a family of models writes calls."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of which a chat template has at least one if its model writes this form."""
        ...

    @property
    def opening(self) -> str:
        """Text before a call; "" for a form whose answers begin with the call itself."""
        ...

    def parser(self, names: Sequence[str], *, most: int) -> CallParser:
        """names: functions that may be called; most: calls after which the rest of the answer is dropped."""
        ...

    def grammar(self, functions: Sequence[Function], tokens: "Special", *, most: int, is_forced: bool) -> str:
        """Returns a Lark grammar of llguidance. With `is_forced` the answer is 1 to `most` calls; else any text, in
        which a call has valid arguments."""
        ...


class Special(Protocol):
    """The special tokens of a tokenizer."""

    def get(self, text: str, /) -> int | None: ...


def terminal(text: str, tokens: Special) -> str:
    """Returns a text as Lark: its own token if it is a special one, which the bytes of its name do not match."""
    token = tokens.get(text)
    return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"


def moved(node: Any, root: str) -> Any:
    """Returns a copy of a schema with its local references moved below `root`."""
    if isinstance(node, list):
        return [moved(entry, root) for entry in node]
    if not isinstance(node, dict):
        return node
    copy = {key: moved(value, root) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = root + reference.removeprefix("#")
    return copy


def lark_json(schema: dict[str, Any]) -> str:
    """Returns a schema as a part of a Lark grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_FORM})}"


def held_back(text: str, mark: str) -> int:
    """Returns the length of the longest end of `text` that may be the beginning of `mark`."""
    length = min(len(mark) - 1, len(text))
    while length > 0 and not mark.startswith(text[-length:]):
        length -= 1
    return max(length, 0)


@dataclass
class Numbering:
    """Numbers the calls of an answer and gives each its id."""

    id_length: int = 0
    """Length of ids of letters and digits alone, which Mistral's templates require; 0 for OpenAI's form."""
    number: int = -1
    call_id: str = ""

    def begin(self, name: str, arguments: str = "") -> CallPart:
        """Returns the first part of the next call."""
        self.number += 1
        length = self.id_length
        self.call_id = secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"
        return CallPart(self.number, self.call_id, name, arguments)

    def go_on(self, arguments: str) -> CallPart:
        """Returns a further part of the call that began last."""
        return CallPart(self.number, self.call_id, "", arguments)
