"""Records that hold a question with its answer or a whole conversation, in the layouts of published data sets.

    question, answer
    instruction, output, and input where there is one        Alpaca
    prompt, completion: two texts, or two lists of turns     TRL
    messages: turns with role and content                    OpenAI, TRL
    conversations: turns with from and value                 ShareGPT

Any of them may have a field `system`, the text of a system turn. docs/data.md shows an example of each.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from modelwright.data.document import Message, join_turns

FORMS = (
    "question + answer, instruction (+ input) + output, prompt + completion, "
    'messages [{"role": "user", "content": ...}, ...] or conversations [{"from": "human", "value": ...}, ...]'
)
"""The accepted forms, for messages to the user."""

ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
}  # fmt: skip
"""The role of a turn by the names that data sets give it."""

_NEEDED = (
    ("messages",), ("conversations",), ("question", "answer"), ("instruction", "output"), ("prompt", "completion"),
)  # fmt: skip
FIELDS = tuple(dict.fromkeys([name for names in _NEEDED for name in names] + ["input", "system"]))
"""All fields that the forms have."""

_HINTS = {
    *(name for names in _NEEDED for name in names), "answers", "query", "response", "responses", "chosen", "rejected",
    "dialog", "dialogue", "conversation", "turns",
}  # fmt: skip
"""Fields that only questions, answers and conversations have."""


def form_of(names: Iterable[str]) -> tuple[str, ...]:
    """The required fields of the layout that a record or table with these fields has; empty if it has none."""
    there = set(names)
    return next((needed for needed in _NEEDED if there.issuperset(needed)), ())


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Whether a record has one of the layouts; a table may hold them in another row."""
    form = form_of(record)
    return bool(form) and record[form[0]] is not None


def num_hints(names: Iterable[str]) -> int:
    """How many fields are named like those of a question, an answer or a conversation."""
    return len(_HINTS.intersection(names))


def read_conversation(record: Mapping[str, Any]) -> list[Message]:
    """The turns of a record for which `is_conversation` is true. Raises `ValueError` that says what is wrong."""
    form = form_of(record)
    if len(form) == 1:
        turns = _turns(form[0], record[form[0]])
    elif form[0] == "prompt":
        turns = _side(record, "prompt", "user") + _side(record, "completion", "assistant")
    else:
        question = _text(record, form[0])
        if form[0] == "instruction" and record.get("input"):
            question += "\n\n" + _text(record, "input")
        turns = [_turn("user", question), _turn("assistant", _text(record, form[1]))]
    if record.get("system") and turns[0]["role"] != "system":
        turns = [_turn("system", _text(record, "system")), *turns]
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
        raise ValueError(f"{form[-1]} has no answer (a turn of the assistant with text)")
    return turns


def conversation_meta(turns: list[Message]) -> tuple[str, dict[str, Any]]:
    """The text of a conversation's document and its `meta`: `question` and `answer`, or `messages` for other turns."""
    if [turn["role"] for turn in turns] == ["user", "assistant"]:
        return join_turns(turns), {"question": turns[0]["content"], "answer": turns[1]["content"]}
    return join_turns(turns), {"messages": turns}


def _side(record: Mapping[str, Any], name: str, role: str) -> list[Message]:
    """The turns of a prompt or a completion."""
    if isinstance(record[name], list):
        return _turns(name, record[name])
    return [_turn(role, _text(record, name))]


def _turns(name: str, turns: Any) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{name} is not a list of turns")
    return [_read_turn(name, number, turn) for number, turn in enumerate(turns, start=1)]


def _read_turn(name: str, number: int, turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn {number} of {name} is not an object with a role and a text")
    role = _first(turn, "role", "from")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"turn {number} of {name} has the role {role!r}, not one of {', '.join(ROLES)}")
    text = _first(turn, "content", "value")
    if not isinstance(text, str):
        raise ValueError(f"turn {number} of {name} has no text in its content")
    return _turn(ROLES[role], text)


def _first(turn: Mapping[str, Any], *names: str) -> Any:
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the field {name!r} is empty or holds no text")
    return value


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}
