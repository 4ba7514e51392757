"""Calls of functions in the text of an answer: the parts that a client receives, and the protocol of their forms.

The first form is in this file: calls as JSON objects with the name and the arguments, which most families of models
write, between marks of their own: Hermes and Qwen (`<tool_call>`), Mistral (`[TOOL_CALLS]` and a list), Llama 3
(`parameters`), and plain JSON.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

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


HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The beginning of a call whose arguments can be sent before it is complete."""
_NAMES = ("arguments", "parameters")
MAX_WAITING = 16_384
"""Most characters of an object that may become a call with its keys in another order."""


@dataclass(frozen=True)
class JsonForm:
    """A form of JSON objects. opening, closing: marks around a call, or around all calls with `is_list`; separator:
    between calls; field: name of the arguments. All readers accept both names of the arguments and free white space.
    """

    name: str
    marks: tuple[str, ...] = ()
    opening: str = ""
    closing: str = ""
    separator: str = ""
    field: Literal["arguments", "parameters"] = "arguments"
    id_length: int = 0
    """Length of the ids of calls, of letters and digits; 0 for OpenAI's form."""
    before: str = ""
    """What a template writes between the mark and the object, and, in reverse, before the closing mark."""

    def parser(self, names: Sequence[str], *, most: int) -> "JsonCalls":
        return JsonCalls(self, frozenset(names), most)

    def grammar(self, functions: Sequence[Function], tokens: Special, *, most: int, is_forced: bool) -> str:
        definitions: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for number, one in enumerate(functions):
            # each schema refers to itself by "#", which is the combined schema now
            root = f"#/$defs/{number}"
            free = {"type": "object"}
            definitions[str(number)] = moved(one.schema, root) if is_forced or one.is_strict else free
            properties = {"name": {"const": one.name}, self.field: {"$ref": root}}
            calls.append({"type": "object", "properties": properties, "required": list(properties),
                          "additionalProperties": False})  # fmt: skip
        schema = {"anyOf": calls, "$defs": definitions}
        space, lines = (json.dumps(self.before) + " " if self.before else ""), list[str]()
        opened, closed = (terminal(mark, tokens) if mark else "" for mark in (self.opening, self.closing))
        between = json.dumps(self.separator) if self.separator else ""
        if self.separator:
            more = f"({between} one){{0,{most - 1}}}" if most > 1 else ""
            calls_rule = f"{opened} {space}one {more} {closed}"
            inner = "one: object"
        else:
            inner = f"one: {opened} {space}object {space}{closed}"
            newline = '"\\n" ' if self.opening else ""
            calls_rule = f"one ({newline}one){{0,{most - 1}}}" if most > 1 else "one"
        if is_forced:
            lines = [f"start: {calls_rule}"]
        elif not self.opening:
            lines = [f"start: {calls_rule} | FREE", r"FREE: /([^{\[](?s:.)*)?/"]
        elif tokens.get(self.opening) is not None:
            lines = [f"start: FREE ({calls_rule})?", r"FREE: /(?s:.*)/"]
        else:
            mark = re.escape(self.opening).replace("/", r"\/")
            lines = [f"start: FREE ({calls_rule})?", f"FREE: /(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/"]
        return "\n".join([*lines, inner, f"object: {lark_json(schema)}"])


@dataclass
class JsonCalls:
    """Reads calls in a form. The state is where the answer is: in text, before an object, or in its arguments."""

    form: JsonForm
    names: frozenset[str]
    most: int
    _held: str = ""
    _raw: str = ""
    """What was read of the object so far, which becomes text if it is no call."""
    _state: Literal["text", "calls", "arguments", "after"] = "text"
    _numbering: Numbering = field(init=False)
    _depth: int = 0
    _is_string: bool = False
    _is_escaped: bool = False
    _scanned: int = 0
    _is_plain: bool = False
    """The answer has turned out to be text, in a form whose calls have no mark."""

    def __post_init__(self) -> None:
        self._numbering = Numbering(self.form.id_length)

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts, is_last=is_last):
            pass
        if is_last and self._held:
            if self._state == "arguments":
                parts.append(self._numbering.go_on(self._held))
            elif self._state in ("calls", "text"):
                parts.append(TextPart(TEXT_SHOWN, self._raw + self._held))
            self._held = self._raw = ""
        elif is_last and self._raw and self._state == "calls":
            parts.append(TextPart(TEXT_SHOWN, self._raw))
            self._raw = ""
        return parts

    def _step(self, parts: list[Part], *, is_last: bool) -> bool:
        """Does one step; returns False if it needs more text."""
        if self._state == "text":
            return self._in_text(parts, is_last=is_last)
        if self._state == "calls":
            return self._in_calls(parts, is_last=is_last)
        if self._state == "arguments":
            return self._in_arguments(parts)
        return self._after(is_last=is_last)

    def _in_text(self, parts: list[Part], *, is_last: bool) -> bool:
        if not self._held:
            return False
        opening = self.form.opening
        if not opening:
            rest = self._held.lstrip()
            if self._is_plain or (rest and rest[0] not in "{["):
                self._is_plain = True
                parts.append(TextPart(TEXT_SHOWN, self._held))
                self._held = ""
                return False
            if not rest:
                return False
            self._state = "calls"
            return True
        before, found, after = self._held.partition(opening)
        keep = 0 if found or is_last else held_back(self._held, opening)
        shown = before[: len(before) - keep] if not found else before
        self._is_plain = self._is_plain or bool(shown.strip())
        if shown:
            parts.append(TextPart(TEXT_SHOWN, shown))
        self._held = after if found else self._held[len(self._held) - keep :]
        if found:
            self._raw, self._state = opening, "calls"
        return bool(found)

    def _in_calls(self, parts: list[Part], *, is_last: bool) -> bool:
        """Before or in an object whose arguments have not begun to be sent."""
        start = len(self._held) - len(self._held.lstrip("[,; \t\r\n"))
        if start == len(self._held):
            return False
        if self._held[start] != "{":
            return self._give_up(parts)
        head = HEAD.match(self._held, start)
        if (head and head.group(1) not in self.names) or len(self._held) > MAX_WAITING:
            return self._give_up(parts)
        if head:
            parts.append(self._numbering.begin(head.group(1)))
            self._raw, self._held, self._state = "", self._held[head.end() :], "arguments"
            self._depth, self._is_string, self._is_escaped = 0, False, False
            return True
        if "}" not in self._held[self._scanned :]:
            return False
        end, self._scanned = _end_of_object(self._held, start), len(self._held)
        if end < 0:
            return False
        name, arguments = _whole_call(self._held[start:end])
        if name not in self.names:
            return self._give_up(parts)
        parts.append(self._numbering.begin(name, arguments))
        self._raw, self._held, self._state, self._scanned = "", self._held[end:], "after", 0
        return True

    def _give_up(self, parts: list[Part]) -> bool:
        """What looked like a call is text, up to the next mark."""
        if self._held or self._raw:
            # the mark itself is not read again
            text, self._raw = self._raw, ""
            parts.extend([TextPart(TEXT_SHOWN, text)] if text else [])
        self._state, self._is_plain, self._scanned = "text", True, 0
        return True

    def _in_arguments(self, parts: list[Part]) -> bool:
        for place, character in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped, self._is_string = character == "\\", character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    parts.append(self._numbering.go_on(self._held[: place + 1]))
                    # the brace that closes the call is read with what is between calls
                    self._held, self._state = self._held[place + 1 :], "after"
                    return True
        if self._held:
            parts.append(self._numbering.go_on(self._held))
            self._held = ""
        return False

    def _after(self, *, is_last: bool) -> bool:
        """Between calls: braces, separators, marks and white space are dropped; other text is text again."""
        if self._numbering.number + 1 >= self.most:
            self._held = ""
            return False
        form, rest = self.form, self._held.lstrip("}],; \t\r\n")
        closing = form.closing if form.closing not in ("", "]") else ""
        if closing and rest.startswith(closing):
            self._held = rest[len(closing) :]
            return True
        if not closing and rest.startswith("{"):
            self._held, self._state = rest, "calls"
            return True
        is_mark = any(mark and mark.startswith(rest) for mark in (closing, form.opening)) and rest != form.opening
        if not rest or (not is_last and is_mark):
            self._held = rest
            return False
        self._held, self._state, self._is_plain = rest, "text", True
        return True


def _end_of_object(text: str, start: int) -> int:
    """Returns the end of the JSON object at `start`, or -1 if it has not ended yet."""
    depth, is_string, is_escaped = 0, False, False
    for place in range(start, len(text)):
        character = text[place]
        if is_escaped:
            is_escaped = False
        elif is_string:
            is_escaped, is_string = character == "\\", character != '"'
        elif character == '"':
            is_string = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if depth == 0:
                return place + 1
    return -1


def _whole_call(text: str) -> tuple[str, str]:
    """Returns the name and the arguments of a call whose keys come in another order; ("", "") for other JSON."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""
    arguments = next((call[name] for name in _NAMES if name in call), {}) if isinstance(call, dict) else None
    if isinstance(arguments, str):  # some models write the arguments as a text of JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "", ""
    if not isinstance(arguments, dict):
        return "", ""
    name = cast(dict[str, Any], call).get("name")
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(name, str) else ("", "")
