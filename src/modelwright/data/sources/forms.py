"""The forms in which data sets write conversations, each an entry of `FORMS_OF_RECORDS`.

A form names the fields by which it is recognized and reads a record as turns. It takes the record's fields from
`Fields`, which report what no form takes. What any form may have beside its own fields is read here once: a system
turn, earlier turns (`history`), tools, a thought, and a label that makes the answer of a conversation a good or a bad
one (LLaMA-Factory's `kto_tag`, TRL's `label`).
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

from modelwright.data.document import Message, join_turns, says_something
from modelwright.data.sources.fields import LABEL_WORDS, Fields, as_flag, as_text, printable
from modelwright.data.sources.turns import THOUGHTS, check_learned, parsed, read_tools, read_turns, turn

FORMS = (
    "question (+ choices) + answer, instruction (+ input) + output, prompt + completion, "
    'messages [{"role": "user", "content": ...}, ...], conversations [{"from": "human", "value": ...}, ...] '
    "(prompt +) chosen + rejected, input + preferred_output + non_preferred_output, prompt + completion + label or, to "
    "answer prompts by reinforcement learning, prompt alone"
)
"""Accepted forms, for messages to the user."""
UNPAIRED, PAIRED, OPENAI_PAIRED = "unpaired_preference", "preference", "openai_preference"
PROMPT_ONLY = "prompt_only"
PASSAGES = ("context", "passage", "article")
"""Fields of the text that a question is about, which precedes it."""
LABELS = ("kto_tag", "label", "desirable")
SYSTEMS = ("system", "system_prompt", "system_message")
TURN_MARK = re.compile(r"(?:^|\n\n)(Human|Assistant):")
"""Beginning of a turn of a dialogue in one text, as in HH-RLHF (Bai et al. 2022)."""
_FURTHER = (
    "input", "prompt", *SYSTEMS, "history", "tools", "functions", "chat_template_kwargs", "answerKey", "answers",
    "margin", "reasoning_content", "reasoning", "thinking", "response", "conversation", *LABELS, *PASSAGES,
)  # fmt: skip


class PairError(ValueError):
    """An unusable preference. reason: a few words, under which such records are counted."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


@dataclass(frozen=True)
class Form:
    """A layout of records. needs: the fields by which it is recognized; takes_label: its answer may be a bad one."""

    name: str
    needs: tuple[str, ...]
    read: Callable[[Fields], list[Message]]
    takes_label: bool = True
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Another name of a needed field."""

    def fits(self, names: Iterable[str]) -> bool:
        present = set(names)
        return all(name in present or self.aliases.get(name) in present for name in self.needs)

    def missing(self, fields: Mapping[str, Any]) -> str:
        """Returns the first needed field that a record lacks; "" if it has all of them."""
        lacks = (name for name in self.needs if name not in fields and self.aliases.get(name) not in fields)
        return next(lacks, "")

    def last_name(self, fields: Fields) -> str:
        """Returns the name that the last needed field has in a record."""
        name = self.needs[-1]
        alias = self.aliases.get(name, name)
        return alias if fields.plain.get(name) is None and alias in fields.plain else name


def _read_sharegpt(fields: Fields) -> list[Message]:
    value = fields.first("conversations", "conversation")
    return read_turns("conversations", parsed(value), fields)


def _read_choice(fields: Fields) -> list[Message]:
    choices, right = read_choices(fields)
    if not choices:
        return _read_question(fields)
    return [turn("user", _text(fields, "question")), turn("assistant", choices[right])]


def _read_question(fields: Fields) -> list[Message]:
    """A question, with a passage before it where the record has one; of several answers (SQuAD) the first is taken."""
    question, answer = _text(fields, "question"), fields.first("answer", "answers")
    name = "answer" if "answer" in fields.plain else "answers"
    if isinstance(answer, Mapping):  # SQuAD
        answer = cast(Mapping[str, Any], answer).get("text")
    if isinstance(answer, list):
        if not answer:
            raise ValueError(f"the field {name!r} is empty, so the question cannot be learned")
        answer = cast(list[Any], answer)[0]
    passage, beside = _optional(fields, *PASSAGES), fields.plain.get("text")
    # Some data sets have there what they made of question and answer (Alpaca); others what the question is about.
    if not passage and isinstance(beside, str) and beside.strip() and question not in beside:
        raise ValueError(
            "the field 'text' next to a question may be the passage that it asks about; pass --data.fields "
            "'{context: text}' if so, otherwise --data.ignore text"
        )
    return [turn("user", _joined(passage, question)), turn("assistant", as_text(name, answer))]


def _read_instruction(fields: Fields) -> list[Message]:
    question = _joined(_text(fields, "instruction"), _optional(fields, "input") or _optional(fields, "context"))
    return [turn("user", question), turn("assistant", _text(fields, INSTRUCTION.last_name(fields)))]


def _read_prompt(fields: Fields) -> list[Message]:
    return _side(fields, "prompt", "user") + _side(fields, PROMPT.last_name(fields), "assistant")


def _read_openai(fields: Fields) -> list[Message]:
    return _openai_prompt(fields) + read_turns("preferred_output", fields["preferred_output"], fields)


def _openai_prompt(fields: Fields) -> list[Message]:
    value = fields["input"]
    if not isinstance(value, Mapping):
        raise ValueError("input is not an object with messages")
    if further := [name for name in value if name not in ("messages", "tools", "parallel_tool_calls")]:
        raise ValueError(f"input has the field {further[0]!r}, which is not understood there; remove it")
    return read_turns("input.messages", cast(Mapping[str, Any], value).get("messages"), fields)


OPENAI = Form(OPENAI_PAIRED, ("input", "preferred_output", "non_preferred_output"), _read_openai, takes_label=False)
PREFERENCE = Form(PAIRED, ("chosen", "rejected"), lambda fields: _preference_turns(fields, "chosen"), takes_label=False)
INSTRUCTION = Form("instruction", ("instruction", "output"), _read_instruction, aliases={"output": "response"})
PROMPT = Form("prompt_completion", ("prompt", "completion"), _read_prompt, aliases={"completion": "response"})
FORMS_OF_RECORDS: tuple[Form, ...] = (
    OPENAI,
    PREFERENCE,
    Form("messages", ("messages",), lambda fields: read_turns("messages", parsed(fields.get("messages")), fields)),
    Form("sharegpt", ("conversations",), _read_sharegpt, aliases={"conversations": "conversation"}),
    Form("multiple_choice", ("question", "choices"), _read_choice, takes_label=False),
    Form("question_answer", ("question", "answer"), _read_question, aliases={"answer": "answers"}),
    INSTRUCTION,
    PROMPT,
    Form(PROMPT_ONLY, ("prompt",), lambda fields: _side(fields, "prompt", "user"), takes_label=False),
)
"""In the order of recognition: a form precedes those whose fields are among its own."""
_BY_NAME = {form.name: form for form in FORMS_OF_RECORDS}
RECORD_TYPES: Mapping[str, tuple[str, ...]] = {
    **{form.name: form.needs for form in FORMS_OF_RECORDS}, UNPAIRED: ("prompt", "completion", "label"),
}  # fmt: skip
"""Fields by record type."""
FIELDS = tuple(dict.fromkeys([*(name for form in FORMS_OF_RECORDS for name in form.needs), *_FURTHER]))
"""All fields of the forms."""
_HINTS = {
    *(name for form in FORMS_OF_RECORDS for name in form.needs if name != "input"), "answers", "query", "response",
    "responses", "dialog", "dialogue", "conversation", "turns",
}  # fmt: skip
"""Names of fields that only questions, answers and conversations have."""


def record_type(names: Iterable[str]) -> str:
    """Returns the type of a record or table with these fields, a key of `RECORD_TYPES`; "" for another record."""
    return _record_type(frozenset(names))


@lru_cache(maxsize=1024)
def _record_type(names: frozenset[str]) -> str:
    """Remembers the types: records of a file have few sets of names, and each is looked up as often as three times."""
    return next((form.name for form in FORMS_OF_RECORDS if form.fits(names)), "")


def type_of_record(record: Mapping[str, Any]) -> str:
    """Returns `record_type` of a record, considering its values: one with a label is an unpaired preference."""
    plain = record.plain if isinstance(record, Fields) else record
    kind = record_type(name for name, value in plain.items() if value is not None)
    # The columns of a table may be those of other rows, whose values are None in this one.
    if kind and _BY_NAME[kind].takes_label and _label_name(record):
        return UNPAIRED
    # An answer that is missing makes no prompt of a pair.
    if kind == PROMPT_ONLY:
        return record_type(plain)
    return kind or record_type(plain)


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Returns True if a record has one of the types."""
    plain = record.plain if isinstance(record, Fields) else record
    kind = record_type(plain)
    if not kind or record_type(name for name, value in plain.items() if value is not None):
        return bool(kind)
    form = _BY_NAME[kind]
    return any(plain.get(name) is not None for name in (form.needs[0], form.aliases.get(form.needs[0], "")))


def num_hints(names: Iterable[str]) -> int:
    """Returns the number of fields that are named like those of a question, an answer or a conversation."""
    return len(_HINTS.intersection(names))


@dataclass(frozen=True)
class Reading:
    """What a record says. turns: of a preference pair the chosen ones; meta: of the document, without the turns."""

    turns: list[Message]
    meta: dict[str, Any]


def read_record(fields: Fields, kind: str = "") -> Reading:
    """Reads a record of a type, by default the one recognized. Raises `ValueError`."""
    kind = kind or type_of_record(fields)
    if kind == UNPAIRED:
        answered = record_type(name for name, value in fields.plain.items() if value is not None)
        form = _BY_NAME[answered] if answered and _BY_NAME[answered].takes_label else PROMPT
    else:
        form = _BY_NAME[kind]
    if missing := form.missing(fields.plain):
        problem = f"a record of type {kind} needs the field {missing!r}"
        raise PairError("half a preference pair", problem) if kind == PAIRED else ValueError(problem)
    if kind == UNPAIRED and not any(name in fields for name in LABELS):
        raise ValueError(f"a record of type {kind} needs the field 'label'")
    is_pair = kind in (PAIRED, OPENAI_PAIRED)
    turns = _with_context(fields, form.read(fields), thought=not is_pair)
    meta: dict[str, Any] = {}
    if kind == UNPAIRED:
        _check_answer(form.needs[-1], turns)
        meta = _unpaired(fields, turns)
    elif is_pair:
        _check_answer("chosen" if kind == PAIRED else "preferred_output", turns)
        meta = _paired(fields, turns, kind)
    elif kind == PROMPT_ONLY:
        if turns[-1]["role"] == "assistant":
            raise ValueError("prompt ends with an answer (a turn of the assistant), so nothing is left to answer")
        meta = {"messages": turns}
    else:
        check_learned(turns, form.needs[-1])
    if kind == "multiple_choice":
        choices, right = read_choices(fields)
        meta |= {"choices": choices, "right": right} if choices else {}
    tools = fields.first("tools", "functions")
    if kind == OPENAI_PAIRED:
        tools = tools or fields["input"].get("tools")
    if tools := read_tools(tools):
        meta["tools"] = tools
    variables = parsed(fields.get("chat_template_kwargs"))
    if variables is not None:
        if not isinstance(variables, Mapping):
            raise ValueError("chat_template_kwargs is not an object with variables of the template")
        meta["chat_template_kwargs"] = {k: v for k, v in cast(Mapping[str, Any], variables).items() if v is not None}
    return Reading(turns, meta)


def read_conversation(record: Mapping[str, Any], kind: str = "") -> list[Message]:
    """Returns the turns of a conversation's record, of a preference pair the chosen ones. Raises `ValueError`."""
    return read_record(record if isinstance(record, Fields) else Fields(record), kind).turns


def conversation_meta(turns: list[Message]) -> tuple[str, dict[str, Any]]:
    """Returns the text of a conversation's document and its `meta`: `question` and `answer`, or `messages`."""
    if [set(one) for one in turns] == [{"role", "content"}] * 2 and [one["role"] for one in turns] == _PAIR:
        return join_turns(turns), {"question": turns[0]["content"], "answer": turns[1]["content"]}
    return join_turns(turns), {"messages": turns}


_PAIR = ["user", "assistant"]


def _label_name(record: Mapping[str, Any]) -> str:
    """Returns the field that says whether a single answer is a good one; "" without one."""
    plain = record.plain if isinstance(record, Fields) else record
    for name in LABELS:
        value = plain.get(name)
        if name not in plain:
            continue
        # Text that is no judgement, such as the name of a class, is another field than the label; a few words are one
        # only if the user says so.
        is_said = isinstance(record, Fields) and record.is_mapped(name)
        if name != "label" or not isinstance(value, str) or is_said or value.strip().lower() in LABEL_WORDS:
            return name
    return ""


def read_choices(record: Mapping[str, Any]) -> tuple[list[str], int]:
    """Returns the choices of a question and the place of the right one, from 0; an empty list without choices.

    `choices` is a list of texts, or `{"text": [...], "label": [...]}`; `answer` or `answerKey` is the place, the label
    (a letter by default) or the text of the right one. Raises `ValueError` with the problem.
    """
    choices = record.get("choices")
    if not choices:
        return [], 0
    texts: Any = choices.get("text") if isinstance(choices, Mapping) else choices
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ValueError("the field 'choices' is not a list of two or more texts")
    labels = choices.get("label") if isinstance(choices, Mapping) else None
    if labels and (not isinstance(labels, list) or len(labels) != len(texts)):
        raise ValueError("the field 'choices' does not have one label for each text")
    names = [str(one) for one in labels] if labels else [chr(ord("A") + place) for place in range(len(texts))]
    answer = record.get("answer") if record.get("answer") is not None else record.get("answerKey")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return texts, answer
    # A label or text that occurs twice identifies none.
    for known in (names, texts):
        if isinstance(answer, str) and known.count(answer) == 1:
            return texts, known.index(answer)
    shown = printable(repr(answer))
    raise ValueError(f"the answer {shown} is neither the place nor the label nor the text of one of the choices")


def _with_context(fields: Fields, turns: list[Message], *, thought: bool = False) -> list[Message]:
    """Adds the system turn and earlier turns before the others, and the record's thought to the last answer."""
    if history := parsed(fields.get("history")):
        place = 1 if turns[0]["role"] == "system" else 0
        turns = [*turns[:place], *_history(history, fields), *turns[place:]]
    name = next((name for name in SYSTEMS if fields.plain.get(name)), "")
    if name and turns[0]["role"] != "system":
        turns = [turn("system", _text(fields, name)), *turns]
    elif name and fields.plain[name] == turns[0]["content"]:
        fields.get(name)  # said twice
    if thought and (said := fields.first(*THOUGHTS)):
        if not isinstance(said, str) or turns[-1]["role"] != "assistant":
            raise ValueError("the thought is not a text, or no answer follows it")
        turns = [*turns[:-1], {**turns[-1], "reasoning_content": said}]
    return turns


def _history(history: Any, fields: Fields) -> list[Message]:
    """Reads earlier turns: pairs of a question and its answer (Alpaca, LLaMA-Factory), or turns."""
    if not isinstance(history, list):
        raise ValueError("history is not a list of earlier turns")
    entries = cast(list[Any], history)
    if all(isinstance(entry, Mapping) for entry in entries):
        return read_turns("history", entries, fields)
    turns: list[Message] = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(text, str) for text in entry):
            raise ValueError(f"entry {number} of history is not a pair of a question and its answer")
        turns += [turn("user", entry[0]), turn("assistant", entry[1])]
        if not entry[1].strip():
            turns[-1] = {**turns[-1], "train": False}
    return turns


def _unpaired(fields: Fields, turns: list[Message]) -> dict[str, Any]:
    name = _label_name(fields) or next(name for name in LABELS if name in fields)
    label = as_flag(fields.get(name))
    if label is None:
        value = fields.plain[name]
        raise PairError("the label is neither true nor false", f"{name} is {printable(repr(value))}, not true or false")
    completion = fields.plain.get("completion")
    num_answer_turns = len(completion) if isinstance(completion, list) else 1
    return {"desirable": label, "prompt_turns": len(turns) - num_answer_turns}


def _paired(fields: Fields, turns: list[Message], kind: str) -> dict[str, Any]:
    """Returns the fields about a preference in the `meta` of its document: `rejected`, the rejected end, the number of
    turns before it, and `margin` if the record has one."""
    if kind == OPENAI_PAIRED:
        rejected = _openai_prompt(fields) + read_turns("non_preferred_output", fields["non_preferred_output"], fields)
    else:
        rejected = _preference_turns(fields, "rejected")
    rejected = _with_context(fields, rejected)
    # Both conversations repeat the prompt: the turns that they have in common.
    common = 0
    while common < min(len(turns), len(rejected)) and turns[common] == rejected[common]:
        common += 1
    if common == len(rejected) or common == len(turns):
        raise PairError("chosen and rejected are the same", "chosen and rejected are the same")
    if any(one["role"] != "assistant" for one in (turns[common], rejected[common])):
        raise PairError("chosen and rejected have different prompts", "chosen and rejected differ before the answer")
    _check_answer("rejected", rejected)
    meta: dict[str, Any] = {"rejected": rejected[common:], "prompt_turns": common}
    margin = fields.get("margin")
    if margin is None:
        return meta
    # An integer of JSON may exceed any FP64.
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= sys.float_info.max:
        raise PairError("the margin is not a number", f"margin is {printable(repr(margin))}, not a finite number")
    return meta | {"margin": float(margin)}


def _preference_turns(fields: Fields, name: str) -> list[Message]:
    """Returns the conversation up to the chosen or rejected answer.

    A plain text, or turns of the assistant alone, follow the prompt; turns that begin before the answer are the whole
    conversation, and repeat any prompt (as in UltraFeedback). Without a prompt, a text may be a whole dialogue (as in
    HH-RLHF): `\n\nHuman: ...\n\nAssistant: ...`. The prompt stands in `prompt`, in a list of turns (LLaMA-Factory), in
    `question`, or in `instruction` with `input`.
    """
    plain = fields.plain
    if plain.get(name) is None:
        raise PairError("half a preference pair", f"the field {name!r} is missing")
    if isinstance(plain[name], str) and plain.get("prompt") is None and TURN_MARK.match(plain[name]):
        text: str = fields[name]
        marks = list(TURN_MARK.finditer(text))
        ends = [after.start() for _, after in pairwise(marks)] + [len(text)]
        roles = {"Human": "user", "Assistant": "assistant"}
        return [turn(roles[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
    if isinstance(plain[name], str) and not plain[name].strip():
        raise PairError("empty answer", f"the field {name!r} is empty or not a text")
    # Turns alone would be read as a prompt and an answer in other forms; here one object is the answer itself.
    answer = _side(fields, name, "assistant")
    if answer[0]["role"] != "assistant":
        # A prompt beside whole conversations repeats what they begin with.
        fields.get("prompt")
        return answer
    if plain.get("prompt") is not None:
        return _side(fields, "prompt", "user") + answer
    for turns in ("conversations", "messages"):
        if plain.get(turns) is not None:
            return read_turns(turns, parsed(fields[turns]), fields) + answer
    if plain.get("question") is not None:
        return [turn("user", _joined(_optional(fields, *PASSAGES), _text(fields, "question"))), *answer]
    if plain.get("instruction") is not None:
        return [turn("user", _joined(_text(fields, "instruction"), _optional(fields, "input"))), *answer]
    raise ValueError(f"{name} is an answer alone, so the record needs a field 'prompt'")


def _check_answer(name: str, turns: Sequence[Message]) -> None:
    if turns[-1]["role"] != "assistant":
        raise PairError("no answer", f"{name} does not end with an answer (a turn of the assistant)")
    if not says_something(turns[-1]):
        raise PairError("empty answer", f"{name} ends with an empty answer")


def _side(fields: Fields, name: str, role: str) -> list[Message]:
    """Returns the turns of a prompt or a completion."""
    if isinstance(fields[name], list | Mapping):
        return read_turns(name, fields[name], fields)
    return [turn(role, _text(fields, name))]


def _text(fields: Fields, name: str) -> str:
    return as_text(name, fields.get(name))


def _optional(fields: Fields, *names: str) -> str:
    """Takes the first of some fields that is not empty, as a text; "" without any."""
    for name in names:
        if (value := fields.plain.get(name)) is not None and value != "" and value != []:
            value = fields[name]
            # Several passages, as in HotpotQA's simplified form.
            return "\n\n".join(map(str, value)) if isinstance(value, list) else as_text(name, value)
    return ""


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
