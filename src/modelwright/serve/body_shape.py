"""What a JSON body consists of, counted without parsing it.

`json` holds the interpreter's lock (GIL) for a whole body. NumPy releases it during every pass over the bytes, so that
counting stops no stream. The counts of a body that is not JSON are those of its brackets, commas and colons.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

BACKSLASH, QUOTE, COMMA, COLON, LOWER_U, LOWER_D, LOWER_F = (ord(character) for character in '\\",:udf')
LOWER = 0x20
"""The bit that makes an ASCII letter small, and one of `[]` one of `{}`."""
OPEN, CLOSE = ord("{"), ord("}")

ESCAPE_LEN = 6
"""Length of an escape such as `\\ud83d`."""

DEEPEST = 65_535
"""Levels that are told apart: sorting 16-bit numbers takes linear time."""


@dataclass(frozen=True)
class BodyShape:
    """`entries`: of all lists and objects together, an empty one counted as 1; `longest`: of one list or object;
    `containers`: lists and objects; `keys`: of all objects together; `depth`: lists and objects inside each other;
    `is_closed`: whether the last string ends and there are as many closing brackets as opening ones, as in all JSON.
    """

    entries: int
    longest: int
    containers: int
    keys: int
    depth: int
    is_closed: bool = True


def body_shape(body: bytes) -> BodyShape:
    """The shape of a body of JSON in UTF-8, in which no byte of a longer character looks like one of ASCII."""
    data = np.frombuffer(body, np.uint8)
    outside = _outside_strings(data)
    folded = data | LOWER
    is_symbol = (((folded == OPEN) | (folded == CLOSE)) | (data == COMMA)) & outside
    symbols = data[np.flatnonzero(is_symbol)]  # half the time of a mask as index
    is_comma = symbols == COMMA
    is_open = (symbols | LOWER) == OPEN
    depths = np.cumsum(2 * is_open.view(np.int8) + is_comma - 1, dtype=np.int32)  # each other symbol closes one
    containers = int(np.count_nonzero(is_open))
    return BodyShape(
        entries=containers + int(np.count_nonzero(is_comma)),
        longest=_longest(is_open, is_open | is_comma, depths),
        containers=containers,
        keys=int(np.count_nonzero((data == COLON) & outside)),
        depth=max(0, int(depths.max(initial=0))),
        is_closed=not np.any(depths[-1:]) and bool(np.all(outside[-1:])),
    )


def _outside_strings(data: Bytes) -> Mask:
    """True for each byte outside strings. shape: (bytes,)"""
    toggles = (data == QUOTE) & ~_escaped(data)
    return np.logical_not(np.bitwise_xor.accumulate(toggles.view(np.uint8)).view(np.bool_))


def _longest(is_open: Mask, begins_entry: Mask, depths: npt.NDArray[np.int32]) -> int:
    """The most entries of one list or object. A stable sort by depth puts each opening bracket directly before the
    commas of its own list: between two lists of a level stands the bracket of the second.
    """
    entries = np.flatnonzero(begins_entry)
    levels = np.clip(depths[entries], 0, DEEPEST).astype(np.uint16)
    starts = np.flatnonzero(is_open[entries[np.argsort(levels, kind="stable")]])
    return int(np.diff(starts, append=len(levels)).max(initial=0))


def _escaped(data: Bytes) -> Mask:
    """True for each byte behind a backslash that begins an escape: every second one of a run. shape: (bytes,)"""
    is_backslash = data == BACKSLASH
    escaped = np.zeros(len(data), np.bool_)
    escaped[1:] = is_backslash[:-1]
    if not np.any(escaped & is_backslash):
        return escaped
    backslashes = np.flatnonzero(is_backslash)
    numbers = np.arange(len(backslashes))
    begins_run = np.diff(backslashes, prepend=-2) != 1
    run_starts = np.maximum.accumulate(np.where(begins_run, numbers, 0))
    behind = backslashes[(numbers - run_starts) % 2 == 1] + 1
    escaped[behind[behind < len(data)]] = False
    return escaped


def lone_surrogate(body: bytes) -> str:
    """The first escaped half of a surrogate pair without its other half in a body of valid JSON; "" if there is none.
    Such a half is no character that a tokenizer could read. UTF-8 has no halves other than escaped ones.
    """
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
