"""Reads the turns of a conversation: roles, contents, calls, thoughts, and which answers are learned.

The names are those of OpenAI, Mistral, TRL, ShareGPT, LLaMA-Factory, Axolotl and ms-swift. A turn of the assistant that
is context only has `train: False`: by its `weight` (OpenAI, Mistral), `train` or `training` (Axolotl), `loss`
(ms-swift) or `loss_mask`, and where it says nothing.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from modelwright.data.document import Message, says_something
from modelwright.data.sources.fields import Fields, as_flag, as_text, is_deep, printable

ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "function_call": "assistant", "tool_call": "assistant", "tool": "tool",
    "function": "tool", "observation": "tool", "tool_response": "tool",
}  # fmt: skip
"""Role of a turn by its names in data sets."""
_CALLS = ("function_call", "tool_call")
"""Roles of turns whose content is the JSON of a call, or of a list of calls."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_WEIGHTS = ("weight", "train", "training", "loss", "loss_mask")


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def read_turns(name: str, value: Any, fields: Fields) -> list[Message]:
    """Returns the turns in a list, or in one object; `fields` counts what was used. Raises `ValueError`."""
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{name} is not a list of turns")
    messages: list[Message] = []
    weights: list[tuple[int, str, bool]] = []
    for number, one in enumerate(cast(list[Any], turns), start=1):
        where = f"turn {number} of {name}"
        if not isinstance(one, Mapping):
            raise ValueError(f"{where} is not an object with a role and a text")
        own = fields.turn(cast(Mapping[str, Any], one))
        message = _read_turn(where, own)
        learned = _learned(where, own)
        if learned is not None:
            weights.append((number, message["role"], learned))
        if message["role"] == "assistant" and (learned is False or not says_something(message)):
            message = {**message, "train": False}
        messages.append(message)
    # A weight of 1 in every turn says nothing; in some turns only, it says that they are learned.
    if len({learned for _, _, learned in weights}) > 1:
        for number, role, learned in weights:
            if learned and role != "assistant":
                text = f"turn {number} of {name} is of the role {role} and marked to be learned"
                raise ValueError(f"{text}, but only the assistant's turns are; set it to 0")
    return messages


def check_learned(turns: Sequence[Message], name: str) -> None:
    """Raises `ValueError` if no turn of the assistant is learned."""
    answers = [one for one in turns if one["role"] == "assistant" and says_something(one)]
    if not answers:
        raise ValueError(f"{name} lacks an answer (a turn of the assistant with text)")
    if not any(one.get("train", True) for one in answers):
        raise ValueError(f"{name} marks every answer as one that is not learned")


def _read_turn(where: str, fields: Fields) -> Message:
    said = fields.first("role", "from")
    if not isinstance(said, str) or said not in ROLES:
        raise ValueError(f"{where} has the role {printable(repr(said))}, not one of {', '.join(ROLES)}")
    role, text = ROLES[said], fields.first("content", "value")
    calls: list[dict[str, Any]] = []
    if said in _CALLS:
        calls, text = _read_calls(where, text), ""
    elif role == "assistant":
        legacy = fields.get("function_call")
        calls = _read_calls(where, fields.get("tool_calls") or ([legacy] if legacy else []))
    thought = fields.first(*THOUGHTS) if role == "assistant" else None
    if isinstance(text, list):  # parts, as in OpenAI's API
        texts: list[str] = []
        for part in cast(list[Any], text):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "thinking" and role == "assistant" and isinstance(part.get("thinking"), str):
                thought = part["thinking"]
            elif kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{where} has a part that is not text (type {kind!r}); only text can be learned")
            else:
                texts.append(part["text"])
        text = "\n".join(texts)
    # A turn that only calls functions may lack a content.
    if text is None and (calls or thought):
        text = ""
    if isinstance(text, int | float):
        text = as_text("content", text)
    if not isinstance(text, str):
        raise ValueError(f"{where} lacks a text in its content")
    if thought is not None and not isinstance(thought, str):
        raise ValueError(f"{where} has a thought that is not a text")
    # Left out as None or "", a name is no name.
    named = {key: fields[key] for key in ("name", "tool_call_id") if role == "tool" and fields.get(key)}
    result: dict[str, Any] = {**turn(role, text), **({"tool_calls": calls} if calls else {}), **named}
    if thought and thought.strip():
        result["reasoning_content"] = thought
    return result


def _learned(where: str, fields: Fields) -> bool | None:
    """Returns whether a turn is marked to be learned; None if nothing marks it."""
    found: set[bool] = set()
    for name in _WEIGHTS:
        if (value := fields.get(name)) is None:
            continue
        flag = as_flag(value)
        if flag is None:
            raise ValueError(f"{where} has the {name} {printable(repr(value))}; a turn is learned (1) or not (0)")
        found.add(flag)
    if fields.plain.get("mask") is not None:
        raise ValueError(
            f"{where} has a mask, which may mean either; rename it to weight, 1 for a turn that is learned "
            "(or pass --data.ignore mask)"
        )
    if len(found) > 1:
        raise ValueError(f"{where} is marked both to be learned and not to be")
    return next(iter(found), None)


def _read_calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Returns the calls of a turn, with arguments as objects: chat templates write them as JSON."""
    calls = parsed(without_none(value))
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list):
        raise ValueError(f"{where} has tool_calls that are not a list")
    result: list[dict[str, Any]] = []
    for call in cast(list[Any], calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where} has a call without the name of a function")
        arguments = parsed(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise ValueError(f"{where} calls {function['name']} with arguments that are not a JSON object")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        body = {"name": function["name"], "arguments": arguments}
        result.append({**named, "type": "function", "function": body})
    return result


def read_tools(value: Any) -> list[Any]:
    """Returns the functions that the assistant may call, from a list of JSON schemas or its JSON text. Raises
    `ValueError`."""
    tools = parsed(without_none(value or []))
    if not isinstance(tools, list):
        raise ValueError("the field 'tools' is not a list of functions")
    for number, tool in enumerate(cast(list[Any], tools), start=1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {number} of the field 'tools' is not a function with a name")
    return tools


def parsed(value: Any) -> Any:
    """Parses a value that some data sets store as the text of its JSON; raises `ValueError` for too many levels."""
    if not isinstance(value, str):
        return value
    try:
        result = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if is_deep(result):
        raise ValueError(f"the field with the text {printable(value)!r} has too many levels of lists and objects")
    return result


def without_none(value: Any) -> Any:
    """Removes the empty fields of a JSON value."""
    # All rows of a table have the same fields, at every depth.
    if isinstance(value, Mapping):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_none(entry) for entry in value]
    return value
