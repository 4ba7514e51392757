"""Which fields of a record a reader used, and which it did not.

A reader gets its record as `Fields`, which remember each field that was taken, in turns of a conversation, too. So a
field that no reader knows is found without a list that someone has to keep: what is left over is reported for each
file, and a field that would change what is learned is refused, unless `data.ignore` names it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SIGNIFICANT: Mapping[str, str] = {
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "thinking", "chain_of_thought", "cot", "rationale", "thought", "thoughts"),
        "a thought",
    ),
    **dict.fromkeys(
        (
            "context", "contexts", "passage", "passages", "article", "background", "evidence", "paragraph",
            "paragraphs", "document", "documents", "story", "excerpt", "knowledge", "facts",
        ),
        "a passage",
    ),
    **dict.fromkeys(("label", "kto_tag", "desirable"), "a judgement"),
    **dict.fromkeys(("weight", "train", "training", "mask", "loss", "loss_mask", "train_detail"), "what is learned"),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), "functions or calls"),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "an image, a video or a sound"),
    **dict.fromkeys(("history", "chat_history", "conversation_history", "dialogue_history"), "earlier turns"),
    **dict.fromkeys(("system", "system_prompt", "system_message"), "a system turn"),
    "choices": "the choices of a question",
}  # fmt: skip
"""Fields that change what should be learned, and what each holds."""
_MEANT = {
    "a thought": "reasoning_content", "a passage": "context", "a judgement": "label", "earlier turns": "history",
    "a system turn": "system",
}  # fmt: skip
"""Field to which one is mapped that holds this."""
HARMLESS = frozenset(("parallel_tool_calls", "strict", "stream"))
"""Booleans that say how a server should answer and not what is learned."""
TURN = "messages[]."
"""Prefix of the name of a turn's field."""
_IDENTIFIER = re.compile(r"(^|[_.])(id|idx|index|number|row)$", re.IGNORECASE)
"""Names of fields that number records. Of two records they may be 0 and 1; of more, such values repeat, and judge."""
_OF_EVERY_TURN = tuple(TURN + name for name in ("role", "content", "from", "value"))
_MOST_LEVELS = 100
_MOST_NAMES = 500
_MOST_FILES = 200
_MOST_SHOWN = 12
_MANY = "(further fields)"
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
_WORDS = {
    **dict.fromkeys(("chosen", "good", "yes", "desirable", "accepted", "accept", "correct", "pass", "up"), True),
    **dict.fromkeys(("rejected", "bad", "no", "undesirable", "reject", "incorrect", "wrong", "fail", "down"), False),
}
"""Words by which data sets judge an answer."""
LABEL_WORDS = frozenset((*_FLAGS, "chosen", "rejected"))
"""Those that are judgements and not names of classes wherever they occur."""


class Fields(Mapping[str, Any]):
    """A record, or a turn, that remembers which of its fields were taken.

    used: names of the taken fields, as the file spells them; prefix: of these names; names: the file's own name of a
    field by the expected one; rest: fields that are not part of the record but stand in the file; ignored: names that
    are meant to be left over; original: the record as the file has it. Fields that are None do not exist.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        *,
        names: Mapping[str, str] | None = None,
        rest: Mapping[str, Any] | None = None,
        ignored: Sequence[str] = (),
        prefix: str = "",
        shared: "Fields | None" = None,
        original: Mapping[str, Any] | None = None,
    ) -> None:
        self.original = record if original is None else original
        self.ignored = shared.ignored if shared else frozenset(ignored)
        self._names, self._prefix = names or {}, prefix
        self._rest = {**(rest or {}), **{name: record[name] for name in self.ignored.intersection(record)}}
        self.plain = {name: value for name, value in record.items() if name not in self.ignored}
        self.used: set[str] = shared.used if shared else set()
        self.turns: list[Fields] = shared.turns if shared else []
        if shared:
            self.turns.append(self)

    def __getitem__(self, name: str) -> Any:
        value = self.plain[name]
        self.used.add(self._prefix + self._names.get(name, name))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def __contains__(self, name: object) -> bool:
        return name in self.plain

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if self.plain.get(name) is not None else default

    def first(self, *names: str) -> Any:
        """Takes the first of these fields that exists; None without any. Others of them stay unused."""
        return next((self[name] for name in names if self.plain.get(name) is not None), None)

    def turn(self, turn: Mapping[str, Any]) -> "Fields":
        """Returns the fields of a turn, which are counted with those of the record."""
        return Fields(turn, prefix=TURN, shared=self)

    def is_mapped(self, name: str) -> bool:
        """True if the user or a registry says which field of the file this is."""
        return name in self._names

    def take_all(self) -> None:
        """Marks every field as used."""
        self.used.update(name for name, _ in self.present())

    def present(self) -> Iterator[tuple[str, Any]]:
        """Yields names and values of all fields that are not empty, those of turns included."""
        for part in dict.fromkeys([self, *self.turns]):
            entries = [(part._names.get(name, name), value) for name, value in part.plain.items()]
            for name, value in [*entries, *part._rest.items()]:
                # 0 and false are values; texts, lists and objects may be empty.
                if value is not None and (value or not isinstance(value, (str, list, dict, tuple))):
                    yield part._prefix + name, value

    def half_pair(self, reading: Mapping[str, Any]) -> str:
        """Names the used field that has one half of a surrogate pair alone, which UTF-8 cannot hold; "" without one.
        JSON can write it, for example after an emoji was cut in two. reading: all that was read from the record.
        """
        # The arguments of a call may be JSON in a text, whose escapes only the reading has resolved.
        for name, value in [*self.present(), ("arguments", reading)]:
            try:
                _ = (name in self.used or value is reading) and json.dumps(
                    value, ensure_ascii=False, default=str
                ).encode()
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])
                return f"the field {printable(name)} has one half of a surrogate pair without the other, {half}"
        return ""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def refusal(self, registry: str = "") -> tuple[str, str, str] | None:
        """Returns reason, problem and remedy if a field is left over that changes what should be learned. registry: the
        file that names the columns of the record.
        """
        for name, value in self.present():
            own = name.removeprefix(TURN)
            if name in self.used or own in self.ignored or own in HARMLESS:
                continue
            flag = value if isinstance(value, bool) else None
            if isinstance(value, str) and value.strip().lower() in ("true", "false"):
                flag = _FLAGS[value.strip().lower()]
            shown, what = printable(own), SIGNIFICANT.get(own, "")
            if name == own and ((own == "weight" and value in (1, "1")) or own == "loss"):
                continue  # a weight of 1 is what an example has without one; a record's loss is a measurement
            if what and not (own == "label" and isinstance(value, str) and flag is None):
                problem = f"the field {printable(name)!r} ({what}) is not understood in this form"
            elif flag is not None:
                problem = f"the field {printable(name)!r} is {str(flag).lower()} and may say what should be learned"
                what = "a judgement"
            else:
                continue
            meant = _MEANT.get(what, "") if name == own else ""
            mapped = ""
            if registry and meant:
                mapped = f"name its column in {registry}, or "
            elif meant not in ("", own):
                mapped = f"pass --data.fields '{{{meant}: {shown}}}' if it is {what}, or "
            return "field not understood", problem, f"{mapped}pass --data.ignore {shown} to learn without it"
        return None


def is_deep(value: Any, levels: int = _MOST_LEVELS) -> bool:
    """Returns True for lists and objects in one another at more levels than a template or a worker process can take."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return not levels or any(is_deep(part, levels - 1) for part in parts)


def printable(name: str) -> str:
    """The name of a field, or the `repr` of a value, for messages: one line of at most 60 characters."""
    return "".join(c if c.isprintable() else "?" for c in name[:60])


@dataclass
class FieldUse:
    """In how many records of a file each field occurred, and in how many it was used."""

    num_records: int = 0
    present: Counter[str] = field(default_factory=Counter[str])
    used: Counter[str] = field(default_factory=Counter[str])
    _binary: dict[str, set[bool] | None] = field(default_factory=dict[str, "set[bool] | None"], repr=False)
    """Values of fields beside conversations that were 0 or 1 (-1 or 1, "bad" or "good") in every record; None for those
    that had another one."""
    _is_place: dict[str, bool] = field(default_factory=dict[str, bool], repr=False)
    """Whether such a field numbered the turns of each record from 0: then it does not judge them."""

    def add(self, fields: Fields, unread: Sequence[str] = (), *, is_conversation: bool = False) -> None:
        """Adds a record. unread: columns of its table that were not read."""
        self.num_records += 1
        seen = dict.fromkeys(unread)
        places = Counter[str]()
        for name, value in fields.present():
            name = name if name in self.present or len(self.present) < _MOST_NAMES else _MANY
            if is_conversation and name not in fields.used:
                self._compare(name, value, places[name])
            places[name] += 1
            seen[name] = None
        for name in self._is_place.keys() & places.keys():
            # Of answers alone, 0 and 1 may be weights of the first and the second.
            if not name.startswith(TURN) or places[name] != len(fields.turns):
                self._is_place[name] = False
        self.present.update(seen.keys())
        self.used.update(fields.used & seen.keys())

    def _compare(self, name: str, value: Any, place: int) -> None:
        values = self._binary.setdefault(name, set())
        self._is_place[name] = self._is_place.get(name, True) and value == place and not isinstance(value, bool)
        is_sign = not isinstance(value, str) and value == -1
        flag = False if is_sign else None if isinstance(value, bool) else as_flag(value)
        if values is None or flag is None:
            self._binary[name] = None
        else:
            values.add(flag)

    def merge(self, other: "FieldUse") -> None:
        self.num_records += other.num_records
        self.present.update(other.present)
        self.used.update(other.used)

    def binary(self, ignored: Sequence[str]) -> str:
        """What to do about a field beside conversations that was not used and held both 0 and 1, or other signs of bad
        and good, and nothing else; "" without one."""
        found = (
            name for name, values in self._binary.items()
            if values == {True, False} and not self._is_place[name]
            and not (self.present[name] == 2 and _IDENTIFIER.search(name))
        )  # fmt: skip
        if not (name := next((name for name in found if name.removeprefix(TURN) not in ignored), "")):
            return ""
        shown = printable(name.removeprefix(TURN))
        meant = f"pass --data.fields '{{label: {shown}}}' if 1 (or yes, or good) is a good answer"
        if name.startswith(TURN):
            meant = "rename it to weight if 1 is a turn that is learned"
        text = f"the field {printable(name)!r} is 0 or 1 (or bad or good) in every record and may say what should be"
        return f"{text} learned; {meant}, or --data.ignore {shown} to learn without it"

    def facts(self) -> dict[str, Any]:
        fields = {n: {"records": self.present[n], "used": self.used[n]} for n in sorted(self.present)}
        return {"records": self.num_records, "fields": fields}

    def line(self) -> str:
        """`fields used: messages; not used in 10 of 10 records: weight, context`; "" without records."""
        if not self.num_records:
            return ""
        used = [name for name in self.present if self.used[name] and name not in _OF_EVERY_TURN]
        text = f"fields used: {_listed(used) or 'none'}"
        left: dict[int, list[str]] = {}
        for name, count in self.present.items():
            if count > self.used[name]:
                left.setdefault(count - self.used[name], []).append(name)
        for count, names in sorted(left.items(), reverse=True):
            text += f"; not used in {count:,} of {self.num_records:,} records: {_listed(names)}"
        return text


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(printable, names[:_MOST_SHOWN]))
    return shown + (f" and {len(names) - _MOST_SHOWN} others" if len(names) > _MOST_SHOWN else "")


def use_of(tallies: dict[str, FieldUse], name: str) -> FieldUse:
    """Returns the tally of a file; files beyond the first 200 share one."""
    return tallies.setdefault(name if name in tallies or len(tallies) < _MOST_FILES else "other files", FieldUse())


def as_flag(value: Any) -> bool | None:
    """Reads a Boolean that data sets write as true, 1, "true", "chosen" or "good"; None for any other value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    if isinstance(value, str):
        return {**_FLAGS, **_WORDS}.get(value.strip().lower())
    return None


def as_text(name: str, value: Any) -> str:
    """Reads a text. A number or a Boolean becomes its JSON. Raises `ValueError` for anything else, and empty texts."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        text: str = getattr(value, "spelling", str(value))
        if text in ("nan", "inf", "-inf"):
            raise ValueError(f"the field {name!r} holds {text}, which is not a number in JSON")
        return text
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the field {name!r} is empty or not a text")
    return value
