"""Limits of one request, checked before anything is built per item.

`json`, `pydantic` and most tokenizers hold the interpreter's lock (GIL) while they work, and the event loop needs that
lock for every token that it passes on. A large body therefore stalls every running answer, in whichever thread it is
processed. The defense is to reject a body that cannot fit the model's context before it is parsed: by its bytes, then
by its shape, then by the sizes of its fields. NumPy releases the lock during every pass over the bytes, so counting a
shape stops no stream. Many numbers can be legitimate (token ids of several prompts), so they are parsed with pauses
(`api/parsing.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from modelwright.serve.errors import ApiError

BODY_BYTES = 16_384
"""Room in every body for everything but the prompts."""
BYTES_PER_TOKEN = 16
"""Room in a body for each token of a prompt: text has about 4 bytes per token, escaped JSON three times as many."""
BATCH_BYTES_PER_TOKEN = 4
"""Room for each token of each further prompt of a completion request."""
MAX_INPUTS = 2048
"""Most texts of one request for embeddings or scores, as in OpenAI's API."""
MAX_ENTRIES = 1024
"""Most entries of any list or object that is not the prompt."""
MAX_FIELDS = 16
"""Most fields of a message or of a part of one."""
SPARE_ENTRIES = 16_384
"""Entries, lists, objects or keys of a body beyond those that the prompts need. They are parsed in 1 to 4 ms."""
KEYS_PER_TOKEN = 3
"""Most keys per token. A part of a message has two keys, and a message with one part has four, but it takes at least
three tokens: role, part, end."""

Bytes = npt.NDArray[np.uint8]

BACKSLASH, QUOTE, COMMA, COLON, LOWER_U, LOWER_D, LOWER_F = (ord(character) for character in '\\",:udf')
LOWER = 0x20
"""Bit that maps upper-case ASCII letters to lower case, and `[]` to `{}`."""
OPEN, CLOSE = ord("{"), ord("}")
ESCAPE_LEN = 6
"""Length of an escape such as `\\ud83d`."""
DEEPEST = 65_535
"""Deepest level that is distinguished: NumPy sorts 16-bit numbers in linear time."""


@dataclass(frozen=True)
class BodyShape:
    """Counts of a body. `entries`: entries of all lists and objects, an empty one counted as 1; `longest`: entries of
    the longest list or object; `containers`: lists and objects; `keys`: keys of all objects; `depth`: nesting of lists
    and objects; `is_closed`: true if all strings and brackets are closed, as in all JSON.
    """

    entries: int
    longest: int
    containers: int
    keys: int
    depth: int
    is_closed: bool = True


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a model's requests. `context`: tokens of prompt and answer; `max_choices`: answers per request, hence
    prompts; `max_token_bytes`: length of the longest token, 0 if unbounded; `max_body_bytes`: the configured limit;
    `image_bytes`: room in a body for images.
    """

    context: int
    max_choices: int
    max_token_bytes: int
    max_body_bytes: int
    image_bytes: int = 0

    def body_bytes(self, num_prompts: int) -> int:
        """Returns the largest body of a request with up to `num_prompts` prompts."""
        per_token = BYTES_PER_TOKEN + BATCH_BYTES_PER_TOKEN * (num_prompts - 1)
        return min(self.max_body_bytes, BODY_BYTES + self.context * per_token + self.image_bytes)

    def body_too_large(self, num_prompts: int) -> ApiError:
        """Returns a 413 that names the limit."""
        text = f"The body is larger than {self.body_bytes(num_prompts)} bytes, the most that this server reads"
        no_images = "" if self.image_bytes else "; this model reads no images"
        return ApiError(413, f"{text} for a context of {self.context} tokens{no_images}.", code="body_too_large")

    @property
    def of_inputs(self) -> "Limits":
        """The limits of a request for embeddings or scores, whose inputs do not count as answers."""
        return replace(self, max_choices=MAX_INPUTS)

    def check_shape(self, shape: BodyShape) -> None:
        """Raises `ApiError` 400 for a body with more items than any prompts within the context need."""
        self._check_count("list or object", "entries", shape.longest, self.context)
        self._check_count("body", "entries", shape.entries, self.context * self.max_choices)
        self._check_count("body", "lists and objects", shape.containers, self.context)
        self._check_count("body", "keys", shape.keys, self.context * KEYS_PER_TOKEN)

    def _check_count(self, where: str, what: str, count: int, needed: int) -> None:
        most = needed + SPARE_ENTRIES
        if count > most:
            text = f"This model's context is {self.context} tokens. The request has a {where} with {count} {what};"
            raise ApiError(400, f"{text} at most {most} are read. Shorten it.", code="context_length_exceeded")

    def check_chat(self, data: dict[str, Any], param: str = "messages") -> None:
        """Raises `ApiError` 400 for more messages, fields or characters than the context can hold."""
        messages = data.get(param)
        self._check_entries(data, param)
        if not isinstance(messages, list):
            return
        self._check_tokens(len(messages), param, "messages")
        num_characters = num_parts = 0
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            parts = content if isinstance(content, list) else []
            num_parts += len(parts)
            # at most as many parts as the context has tokens: further ones are an error anyway
            for entry in (message, *parts[: self.context]):
                if isinstance(entry, dict) and len(entry) > MAX_FIELDS:
                    text = f"a message has {len(entry)} fields; at most {MAX_FIELDS} are read."
                    text = f"Invalid value for {param!r}: {text}"
                    raise ApiError(400, text, param=param, code="invalid_value")
                for name, value in entry.items() if isinstance(entry, dict) else ():
                    if name != "content" and isinstance(value, (list, dict)) and len(value) > MAX_ENTRIES:
                        text = f"{name!r} has {len(value)} entries; at most {MAX_ENTRIES} are read."
                        text = f"Invalid value for {param!r}: {text}"
                        raise ApiError(400, text, param=param, code="invalid_value")
            texts = [content, *(part.get("text") for part in parts[: self.context] if isinstance(part, dict))]
            num_characters += sum(len(text) for text in texts if isinstance(text, str))
        self._check_tokens(num_parts, param, "parts")
        self._check_characters(num_characters, param)

    def check_prompts(self, data: dict[str, Any], param: str, prompts: Sequence[str] = ()) -> None:
        """Raises `ApiError` 400 for more prompts, tokens or characters in the field `param` than the server can use.
        prompts: all fields with prompts.
        """
        prompt = data.get(param)
        self._check_entries(data, param, *prompts)
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > self.max_choices and param == "prompt":
                raise too_many_answers(self.max_choices)
            if len(prompt) > self.max_choices:
                text = f"{param!r} has {len(prompt)} entries; a request may have at most {self.max_choices}."
                raise ApiError(400, f"{text} Send several.", param=param, code="invalid_value")
            entries: Iterable[Any] = prompt
        else:
            entries = [prompt]
        for one in entries:
            if isinstance(one, str):
                self._check_characters(len(one), param)
            elif isinstance(one, list):
                self._check_tokens(len(one), param, "token ids")

    def _check_entries(self, data: dict[str, Any], *prompts: str) -> None:
        for name, value in data.items():
            if name not in prompts and isinstance(value, (list, dict)) and len(value) > MAX_ENTRIES:
                text = f"Invalid value for {name!r}: it has {len(value)} entries; at most {MAX_ENTRIES} are read."
                raise ApiError(400, text, param=name, code="invalid_value")

    def _check_tokens(self, count: int, param: str, what: str) -> None:
        if count >= self.context:
            text = f"This model's context is {self.context} tokens. The request has {count} {what} in {param!r}."
            raise ApiError(400, f"{text} Shorten the prompt.", param=param, code="context_length_exceeded")

    def _check_characters(self, count: int, param: str) -> None:
        if self.max_token_bytes and count > self.context * self.max_token_bytes:
            text = f"This model's context is {self.context} tokens of at most {self.max_token_bytes} bytes."
            text = f"{text} The request has {count} characters in {param!r}. Shorten the prompt."
            raise ApiError(400, text, param=param, code="context_length_exceeded")


def too_many_answers(most: int) -> ApiError:
    """Returns a 400 for an `n` times the number of prompts that is too large."""
    return ApiError(400, f"Too many answers: n times prompts may be at most {most}.", param="n")


def body_shape(body: bytes) -> BodyShape:
    """Returns the shape of a body: of JSON, or the counts of brackets, commas and colons if it is not JSON."""
    # bytes are characters here: in UTF-8, no byte of a longer character is in the range of ASCII
    data = np.frombuffer(body, np.uint8)
    # a byte is outside strings if an even number of quotes precedes it
    toggles = (data == QUOTE) & ~_escaped(data)
    outside = np.logical_not(np.bitwise_xor.accumulate(toggles.view(np.uint8)).view(np.bool_))
    folded = data | LOWER
    is_symbol = (((folded == OPEN) | (folded == CLOSE)) | (data == COMMA)) & outside
    symbols = data[np.flatnonzero(is_symbol)]  # half the time of a mask as index
    is_comma = symbols == COMMA
    is_open = (symbols | LOWER) == OPEN
    depths = np.cumsum(2 * is_open.view(np.int8) + is_comma - 1, dtype=np.int32)  # each other symbol closes one
    containers = int(np.count_nonzero(is_open))
    # A stable sort by depth puts each opening bracket directly before the commas of its own list. The distances between
    # brackets are then the lengths of the lists: the bracket of the second list of a level ends the first.
    entries = np.flatnonzero(is_open | is_comma)
    levels = np.clip(depths[entries], 0, DEEPEST).astype(np.uint16)
    starts = np.flatnonzero(is_open[entries[np.argsort(levels, kind="stable")]])
    return BodyShape(
        entries=containers + int(np.count_nonzero(is_comma)),
        longest=int(np.diff(starts, append=len(levels)).max(initial=0)),
        containers=containers,
        keys=int(np.count_nonzero((data == COLON) & outside)),
        depth=max(0, int(depths.max(initial=0))),
        is_closed=not np.any(depths[-1:]) and bool(np.all(outside[-1:])),
    )


def _escaped(data: Bytes) -> npt.NDArray[np.bool_]:
    """Returns true for each byte after a backslash that begins an escape. shape: (bytes,)"""
    is_backslash = data == BACKSLASH
    escaped = np.zeros(len(data), np.bool_)
    escaped[1:] = is_backslash[:-1]
    if not np.any(escaped & is_backslash):
        return escaped
    # in a run of backslashes every second one is escaped itself, so it escapes nothing
    backslashes = np.flatnonzero(is_backslash)
    numbers = np.arange(len(backslashes))
    begins_run = np.diff(backslashes, prepend=-2) != 1
    run_starts = np.maximum.accumulate(np.where(begins_run, numbers, 0))
    behind = backslashes[(numbers - run_starts) % 2 == 1] + 1
    escaped[behind[behind < len(data)]] = False
    return escaped


def lone_surrogate(body: bytes) -> str:
    """Returns the first escaped half of a surrogate pair without its other half in a body of valid JSON, or ""."""
    # Python reads such a half as a character, which tokenizers reject; UTF-8 itself cannot contain one
    data = np.frombuffer(body, np.uint8)
    escapes = np.flatnonzero(_escaped(data) & (data == LOWER_U)) - 1
    escapes = escapes[data[escapes + 2] | LOWER == LOWER_D]
    digits = data[escapes + 3] | LOWER
    is_low = (digits >= ord("c")) & (digits <= LOWER_F)
    is_high = ((digits >= ord("8")) & (digits <= ord("9"))) | ((digits >= ord("a")) & (digits <= ord("b")))
    joins_next = np.zeros(len(escapes), np.bool_)
    joins_next[:-1] = is_high[:-1] & is_low[1:] & (np.diff(escapes) == ESCAPE_LEN)
    joins_last = np.zeros(len(escapes), np.bool_)
    joins_last[1:] = joins_next[:-1]
    lone = escapes[(is_high & ~joins_next) | (is_low & ~joins_last)]
    return chr(int(body[lone[0] + 2 : lone[0] + ESCAPE_LEN], 16)) if len(lone) else ""
