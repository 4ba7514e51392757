"""Records that a user names: their conversations, in the layouts of published data sets, and what else they may be.

    question, answer
    question, choices, answer (or answerKey)                 MMLU, ARC: the number, label or text of the right choice
    instruction, output, and input where there is one        Alpaca
    prompt, completion: two texts, or two lists of turns     TRL
    messages: turns with role and content                    OpenAI, TRL
    conversations: turns with from and value                 ShareGPT
    chosen, rejected, and prompt where there is one          preference pairs, TRL; dialogues as one text, HH-RLHF
    prompt, completion, label                                unpaired preferences, TRL

Any of them may have a field `system`, the text of a system turn, and a field `tools`, the functions that the assistant
may call. docs/data.md shows an example of each.

Other records are documents that cleaning wrote, and answers that Modelwright gave: a model that learns from its own
answers by accident gets worse with each generation (Shumailov et al. 2024, AI models collapse when trained on
recursively generated data). A JSON Schema (https://json-schema.org) may say what every record must have.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, cast

from jsonschema import SchemaError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from modelwright.core.errors import ConfigError
from modelwright.data.document import KINDS, SPLITS, Message, join_turns, says_something
from modelwright.data.images.decode import KEY, is_stored_image

FORMS = (
    "question (+ choices) + answer, instruction (+ input) + output, prompt + completion, "
    'messages [{"role": "user", "content": ...}, ...], conversations [{"from": "human", "value": ...}, ...] '
    "(prompt +) chosen + rejected or prompt + completion + label"
)
"""Accepted forms, for messages to the user."""

ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "tool": "tool",
}  # fmt: skip
"""Role of a turn by its names in data sets."""

RECORD_TYPES = {
    "preference": ("chosen", "rejected"), "messages": ("messages",), "sharegpt": ("conversations",),
    "multiple_choice": ("question", "choices"),
    "question_answer": ("question", "answer"), "instruction": ("instruction", "output"),
    "unpaired_preference": ("prompt", "completion", "label"), "prompt_completion": ("prompt", "completion"),
}  # fmt: skip
"""Required fields by record type, in the order of recognition: a type precedes those whose fields are among its own."""
_FURTHER = ("input", "prompt", "system", "tools", "answerKey")
FIELDS = tuple(dict.fromkeys([*(name for names in RECORD_TYPES.values() for name in names), *_FURTHER]))
"""All fields of the forms."""
UNPAIRED, PAIRED = "unpaired_preference", "preference"

LABELS = {"true": True, "false": False}
"""Labels of unpaired preferences in a file of text only (CSV)."""

TURN_MARK = re.compile(r"(?:^|\n\n)(Human|Assistant):")
"""Beginning of a turn of a dialogue in one text, as in HH-RLHF (Bai et al. 2022)."""

_HINTS = {
    *(name for names in RECORD_TYPES.values() for name in names if name != "label"), "answers", "query", "response",
    "responses", "dialog", "dialogue", "conversation", "turns",
}  # fmt: skip
"""Names of fields that only questions, answers and conversations have."""


class PairError(ValueError):
    """An unusable preference. reason: a few words, under which such records are counted."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


def record_type(names: Iterable[str]) -> str:
    """Returns the type of a record or table with these fields, a key of `RECORD_TYPES`; "" for another record."""
    present = set(names)
    return next((name for name, needed in RECORD_TYPES.items() if present.issuperset(needed)), "")


def type_of_record(record: Mapping[str, Any]) -> str:
    """Returns `record_type` of a record, considering its values."""
    # A label that is neither true nor false is another field than that of an unpaired preference.
    kind = record_type(record)
    return "prompt_completion" if kind == UNPAIRED and _label_of(record) is None else kind


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Returns True if a record has one of the types."""
    kind = record_type(record)
    # The columns of a table may be those of other rows, whose values are None in this one.
    return bool(kind) and record[RECORD_TYPES[kind][0]] is not None


def num_hints(names: Iterable[str]) -> int:
    """Returns the number of fields that are named like those of a question, an answer or a conversation."""
    return len(_HINTS.intersection(names))


def read_conversation(record: Mapping[str, Any], kind: str = "") -> list[Message]:
    """Returns the turns of a conversation's record, of a preference pair the chosen ones. Raises `ValueError`."""
    kind = kind or type_of_record(record)
    if kind == "multiple_choice" and not record.get("choices"):
        kind = "question_answer"
    form = RECORD_TYPES[kind]
    if missing := [name for name in form if name not in record]:
        problem = f"a record of type {kind} needs the field {missing[0]!r}"
        raise PairError("half a preference pair", problem) if kind == PAIRED else ValueError(problem)
    if kind == PAIRED:
        turns = _preference_turns(record, "chosen")
    elif kind == "multiple_choice":
        choices, right = read_choices(record)
        turns = [_turn("user", _text(record, "question")), _turn("assistant", choices[right])]
    elif len(form) == 1:
        turns = _turns(form[0], record[form[0]])
    elif kind in ("prompt_completion", UNPAIRED):
        turns = _side(record, "prompt", "user") + _side(record, "completion", "assistant")
    else:
        question = _text(record, form[0])
        if form[0] == "instruction" and record.get("input"):
            question += "\n\n" + _text(record, "input")
        turns = [_turn("user", question), _turn("assistant", _text(record, form[1]))]
    if record.get("system") and turns[0]["role"] != "system":
        turns = [_turn("system", _text(record, "system")), *turns]
    if kind in (PAIRED, UNPAIRED):
        _check_answer(form[0] if kind == PAIRED else form[1], turns)
    elif not any(turn["role"] == "assistant" and says_something(turn) for turn in turns):
        raise ValueError(f"{form[-1]} lacks an answer (a turn of the assistant with text)")
    return turns


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
    names = [str(one) for one in labels] if labels else [chr(ord("A") + place) for place in range(len(texts))]
    answer = record.get("answer") if record.get("answer") is not None else record.get("answerKey")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return texts, answer
    # A label or text that occurs twice identifies none.
    for known in (names, texts):
        if isinstance(answer, str) and known.count(answer) == 1:
            return texts, known.index(answer)
    raise ValueError(f"the answer {answer!r} is neither the place nor the label nor the text of one of the choices")


def read_tools(record: Mapping[str, Any]) -> list[Any]:
    """Returns the functions of the field `tools`, a list of JSON schemas or its JSON text. Raises `ValueError`."""
    tools = _parsed(_without_none(record.get("tools") or []))
    if not isinstance(tools, list):
        raise ValueError("the field 'tools' is not a list of functions")
    for number, tool in enumerate(cast(list[Any], tools), start=1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {number} of the field 'tools' is not a function with a name")
    return tools


def preference_meta(record: Mapping[str, Any], kind: str, turns: list[Message]) -> dict[str, Any]:
    """Returns the fields about a preference in the `meta` of a document of type `kind`: `rejected`, the rejected end of
    a pair, and `margin` if the record has one; or `desirable`, the label of an unpaired preference; with either
    `prompt_turns`, the number of turns before the answer. {} for other types.

    `turns` is the chosen conversation of a pair. Raises `ValueError` with the problem.
    """
    if kind == UNPAIRED:
        label = _label_of(record)
        if label is None:
            raise PairError("the label is neither true nor false", f"label is {record['label']!r}, not true or false")
        num_answer_turns = len(record["completion"]) if isinstance(record["completion"], list) else 1
        return {"desirable": label, "prompt_turns": len(turns) - num_answer_turns}
    if kind != PAIRED:
        return {}
    rejected = _preference_turns(record, "rejected")
    if record.get("system") and rejected[0]["role"] != "system":
        rejected = [_turn("system", _text(record, "system")), *rejected]
    # Both conversations repeat the prompt: the turns that they have in common.
    common = 0
    while common < min(len(turns), len(rejected)) and turns[common] == rejected[common]:
        common += 1
    if common == len(rejected) or common == len(turns):
        raise PairError("chosen and rejected are the same", "chosen and rejected are the same")
    if any(turn["role"] != "assistant" for turn in (turns[common], rejected[common])):
        raise PairError("chosen and rejected have different prompts", "chosen and rejected differ before the answer")
    _check_answer("rejected", rejected)
    meta: dict[str, Any] = {"rejected": rejected[common:], "prompt_turns": common}
    margin = record.get("margin")
    if margin is None:
        return meta
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise PairError("the margin is not a number", f"margin is {margin!r}, not a finite number")
    return meta | {"margin": float(margin)}


def conversation_meta(turns: list[Message]) -> tuple[str, dict[str, Any]]:
    """Returns the text of a conversation's document and its `meta`: `question` and `answer`, or `messages`."""
    if [turn["role"] for turn in turns] == ["user", "assistant"] and "tool_calls" not in turns[1]:
        return join_turns(turns), {"question": turns[0]["content"], "answer": turns[1]["content"]}
    return join_turns(turns), {"messages": turns}


def _preference_turns(record: Mapping[str, Any], name: str) -> list[Message]:
    """Returns the conversation up to the chosen or rejected answer.

    A plain text, or turns of the assistant alone, follow the prompt; turns that begin before the answer are the whole
    conversation, and repeat any prompt (as in UltraFeedback). Without a prompt, a text may be a whole dialogue (as in
    HH-RLHF): `\n\nHuman: ...\n\nAssistant: ...`.
    """
    if record.get(name) is None:
        raise PairError("half a preference pair", f"the field {name!r} is missing")
    if isinstance(record[name], str) and record.get("prompt") is None and TURN_MARK.match(record[name]):
        text: str = record[name]
        marks = list(TURN_MARK.finditer(text))
        ends = [after.start() for _, after in pairwise(marks)] + [len(text)]
        roles = {"Human": "user", "Assistant": "assistant"}
        return [_turn(roles[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]
    if isinstance(record[name], str) and not record[name].strip():
        raise PairError("empty answer", f"the field {name!r} is empty or not a text")
    answer = _side(record, name, "assistant")
    if answer[0]["role"] != "assistant":
        return answer
    if record.get("prompt") is None:
        raise ValueError(f"{name} is an answer alone, so the record needs a field 'prompt'")
    return _side(record, "prompt", "user") + answer


def _check_answer(name: str, turns: list[Message]) -> None:
    if turns[-1]["role"] != "assistant":
        raise PairError("no answer", f"{name} does not end with an answer (a turn of the assistant)")
    if not says_something(turns[-1]):
        raise PairError("empty answer", f"{name} ends with an empty answer")


def _label_of(record: Mapping[str, Any]) -> bool | None:
    """Returns the label of an unpaired preference; None if it is neither true nor false."""
    label = record.get("label")
    return label if isinstance(label, bool) else LABELS.get(str(label).lower())


def _side(record: Mapping[str, Any], name: str, role: str) -> list[Message]:
    """Returns the turns of a prompt or a completion."""
    if isinstance(record[name], list):
        return _turns(name, record[name])
    return [_turn(role, _text(record, name))]


def _turns(name: str, turns: Any) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{name} is not a list of turns")
    messages: list[Message] = []
    for number, turn in enumerate(cast(list[Any], turns), start=1):
        where = f"turn {number} of {name}"
        if not isinstance(turn, Mapping):
            raise ValueError(f"{where} is not an object with a role and a text")
        role, text = (
            next((turn[name] for name in names if turn.get(name) is not None), None)
            for names in (("role", "from"), ("content", "value"))
        )
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where} has the role {role!r}, not one of {', '.join(ROLES)}")
        calls = _read_calls(where, turn) if ROLES[role] == "assistant" else []
        if isinstance(text, list):  # parts, as in OpenAI's API
            for part in cast(list[Any], text):
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind != "text" or not isinstance(part.get("text"), str):
                    raise ValueError(f"{where} has a part that is not text (type {kind!r}); only text can be learned")
            text = "\n".join(part["text"] for part in text)
        # A turn that only calls functions may lack a content.
        if text is None and calls:
            text = ""
        if not isinstance(text, str):
            raise ValueError(f"{where} lacks a text in its content")
        named = {key: turn[key] for key in ("name", "tool_call_id") if ROLES[role] == "tool" and turn.get(key)}
        messages.append({**_turn(ROLES[role], text), **({"tool_calls": calls} if calls else {}), **named})
    return messages


def _read_calls(where: str, turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the calls of a turn, with arguments as objects: chat templates write them as JSON."""
    calls = _parsed(_without_none(turn.get("tool_calls") or []))
    if not isinstance(calls, list):
        raise ValueError(f"{where} has tool_calls that are not a list")
    result: list[dict[str, Any]] = []
    for call in cast(list[Any], calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where} has a call without the name of a function")
        arguments = _parsed(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise ValueError(f"{where} calls {function['name']} with arguments that are not a JSON object")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        body = {"name": function["name"], "arguments": arguments}
        result.append({**named, "type": "function", "function": body})
    return result


def _parsed(value: Any) -> Any:
    """Parses a value that some data sets store as the text of its JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _without_none(value: Any) -> Any:
    """Removes the empty fields of a JSON value."""
    # All rows of a table have the same fields, at every depth.
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_none(entry) for entry in value]
    return value


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the field {name!r} is empty or not a text")
    return value


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


AUTHOR_FIELD, ANSWER_FIELD = "answer_by", "answer"
OWN_AUTHOR = "modelwright"

REMEDY = (
    "learn from its prompts with --data.record_type text --data.text_field prompt, or from the answers, too, with "
    "--data.own_answers train"
)
REMEDY_TEXT = "leave it out, or learn from it with --data.own_answers train"


def with_meta(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a document's record with `meta` as an object where a table has it as text, and without an open split."""
    meta = record.get("meta")
    if not isinstance(meta, str) or record.get("kind") not in KINDS:
        return record
    try:
        fields: Any = json.loads(meta)
    except ValueError:
        return record
    dropped = "split" if record.get("split") in (None, "open") else ""
    return {name: value for name, value in {**record, "meta": fields}.items() if name != dropped}


def is_document(record: Mapping[str, Any]) -> bool:
    """Returns True for a document that cleaning wrote, with all of its fields, except for an open split."""
    is_complete = all(isinstance(record.get(name), str) for name in ("id", "text", "source"))
    if not is_complete or not isinstance(record.get("meta"), dict):
        return False
    if record.get("kind") not in KINDS or ("split" in record and record["split"] not in SPLITS):
        return False
    meta = record["meta"]
    if not has_types_of_document(meta):
        return False
    if record["kind"] == "image":
        return is_stored_image(meta.get(KEY))
    return record["kind"] != "qa" or "messages" in meta or ("question" in meta and "answer" in meta)


def has_types_of_document(meta: Mapping[str, Any]) -> bool:
    """Returns True if the fields of `meta` that `Document` reads have the right types."""
    if not all(isinstance(meta.get(name, ""), str) for name in ("title", "summary", "question", "answer")):
        return False
    if not isinstance(meta.get("desirable", True), bool):
        return False
    for name in ("messages", "rejected"):
        turns = meta.get(name)
        if name in meta and not (isinstance(turns, list) and turns and all(map(_is_turn, cast(list[Any], turns)))):
            return False
    return True


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("role", "content")):
        return False
    calls = turn.get("tool_calls", [])
    if not isinstance(calls, list):
        return False
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    return all(isinstance(function, dict) and "arguments" in function for function in functions)


def is_own(record: Mapping[str, Any]) -> bool:
    """Returns True if Modelwright wrote the answer of a record."""
    return record.get(AUTHOR_FIELD) == OWN_AUTHOR


class RecordSchema:
    """A JSON Schema read from a file."""

    def __init__(self, schema: Any, path: str) -> None:
        """path: the file's path, for errors. Raises `jsonschema.SchemaError` for a schema that is not valid."""
        self._path = path
        kind = validator_for(schema)
        kind.check_schema(schema)
        self._validator = kind(schema)

    @staticmethod
    @cache
    def read(path: str) -> "RecordSchema":
        """Reads the schema of a file. Raises `ConfigError` with the name of the file."""
        try:
            with open(path, encoding="utf-8") as file:
                return RecordSchema(json.load(file), path)
        except OSError as error:
            raise ConfigError(f"schema: {path}: cannot be read ({error.strerror}); give a JSON Schema file") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"schema: {path}: is not JSON ({error}); give a JSON Schema file") from None
        except SchemaError as error:
            raise ConfigError(f"schema: {path}: is not a JSON Schema ({error.message}); correct it") from None

    def problem(self, record: Mapping[str, Any]) -> str:
        """Returns the part of the schema that a record violates, "" for a valid one, without the record's values.

        Raises `ConfigError` for a schema with references or patterns that cannot be resolved.
        """
        try:
            error = best_match(self._validator.iter_errors(dict(record)))
        except (Unresolvable, re.error) as error:
            text = f"schema: {self._path}: cannot be applied ({error}); correct its references and patterns"
            raise ConfigError(text) from None
        if error is None:
            return ""
        field = ".".join(map(str, error.absolute_path)) or "the record"
        rule = f"{error.validator}: {error.validator_value!r}"
        # A rule may be a list of thousands of values.
        return f"{field} violates {rule[:200]}"
