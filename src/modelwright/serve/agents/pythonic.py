"""Calls as a Python list, `[get_tide(town="Bar"), add(a=1, b=2)]`, which Llama 3.2 and 4 and others write. The text is
parsed and never run: arguments are literals.
"""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modelwright.serve.agents.calls import TEXT_SHOWN, Function, Numbering, Part, Special, TextPart, lark_json, moved

MAX_CHARACTERS = 65_536
"""Longest list of calls; Python's parser takes memory for each node."""
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class PythonicForm:
    """Python's notation. Arguments come whole, because they have to be rewritten as JSON."""

    name: str = "pythonic"
    marks: tuple[str, ...] = ("func_name1(params_name1=params_value1",)
    opening: str = ""

    def parser(self, names: Sequence[str], *, most: int) -> "PythonicCalls":
        return PythonicCalls(frozenset(names), most)

    def grammar(self, functions: Sequence[Function], tokens: Special, *, most: int, is_forced: bool) -> str:
        more = f'(", " call){{0,{most - 1}}}' if most > 1 else ""
        calls = f'"[" call {more} "]"'
        lines = [f"start: {calls}" if is_forced else f"start: {calls} | FREE"]
        lines += [] if is_forced else [r"FREE: /([^\[](?s:.)*)?/"]
        lines.append("call: " + " | ".join(f"call{number}" for number in range(len(functions))))
        for number, one in enumerate(functions):
            fields = one.schema.get("properties", {})
            fields = fields if isinstance(fields, dict) else {}
            required = one.schema.get("required", [])
            # required arguments first, so that a comma stands between any two
            order = sorted(fields, key=lambda name: name not in required)
            text = ""
            for place, name in reversed(list(enumerate(order))):
                root = {"$ref": f"#/$defs/all/properties/{name.replace('~', '~0').replace('/', '~1')}"}
                schema = {**root, "$defs": {"all": moved(one.schema, "#/$defs/all")}}
                lines.append(f"value{number}x{place}: {lark_json(schema)}")
                comma = '", " ' if place else ""
                text = f"{comma}{json.dumps(name + '=')} value{number}x{place} {text}"
                text = text if name in required else f"({text})?"
            lines.append(f'call{number}: {json.dumps(one.name + "(")} {text} ")"')
        return "\n".join(lines)


@dataclass
class PythonicCalls:
    """Reads an answer that is a list of calls; any other answer is text."""

    names: frozenset[str]
    most: int
    _held: str = ""
    _is_text: bool = False
    _numbering: Numbering = field(default_factory=Numbering)

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        self._held += text
        rest = self._held.lstrip()
        is_list = not self._is_text and (not rest or rest.startswith("[")) and len(rest) <= MAX_CHARACTERS
        if is_list and not is_last:
            return []
        calls = _calls(rest, self.names) if is_list and rest else []
        if calls:
            self._held = ""
            return [self._numbering.begin(name, arguments) for name, arguments in calls[: self.most]]
        self._is_text, shown, self._held = True, self._held, ""
        return [TextPart(TEXT_SHOWN, shown)] if shown else []


def _calls(text: str, names: frozenset[str]) -> list[tuple[str, str]]:
    """Returns the calls of a list; none if it is anything else than calls of known functions with literals."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        calls = list[tuple[str, str]]()
        for node in tree.elts:
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or name not in names or node.args:
                return []
            arguments = {one.arg: _literal(one.value) for one in node.keywords if one.arg is not None}
            if len(arguments) < len(node.keywords):
                return []
            calls.append((name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
        return calls
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _literal(node: ast.expr) -> Any:
    """Returns the value of a literal in the notation of Python or of JSON. Raises `ValueError` for all others."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys of JSON are texts")
        return {key: _literal(value) for key, value in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError("not a value of JSON")
    return value
