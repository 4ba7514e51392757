"""Generated conversations with calls of functions: conversion of units, arithmetic of dates, and look-up in a table.

A request is a question with the one call that answers it, so that a benchmark can judge a model's calls.
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from modelwright.core.config import derive_seed
from modelwright.data.document import Document, Message, Split, join_turns
from modelwright.data.sources.corpora import NamedCorpus

NUM_CONVERSATIONS = 3_000
NUM_REQUESTS = 5
"""Requests of a conversation. They share the list of functions, which is longer than two requests."""
HELDOUT = 1 / 10
"""Share of the held-out conversations, and of the values, days and towns that only they ask about."""
FACTORS = {
    ("miles", "kilometers"): 1.609344,
    ("pounds", "kilograms"): 0.45359237,
    ("inches", "centimeters"): 2.54,
    ("gallons", "liters"): 3.785411784,
    ("acres", "hectares"): 0.40468564224,
    ("feet", "meters"): 0.3048,
}
"""Units and their exact factors (NIST SP 811, appendix B)."""
COLUMNS = ("population", "elevation", "area", "founded")
_BEGINNINGS = "Bar Kel Mon Tor Vas Lin Der Os Hal Fen Gar Rud Sol Tam Wes Nor Pel Car Bren Mir"
_MIDDLES = "a e i o u an er il en ol ar is"
_ENDINGS = "by dorf ford grad mouth sted ton vik burg ham holm field bridge wick dale port"
TOWNS = tuple("".join(parts) for parts in itertools.product(*map(str.split, (_BEGINNINGS, _MIDDLES, _ENDINGS))))
"""About one per look-up of the conversations. With 512 towns a model memorized how names end and did not copy."""


def _function(name: str, description: str, **kinds: str) -> dict[str, Any]:
    properties = {field: {"type": kind} for field, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _function("convert_unit", "Converts a value.", value="number", unit="string", target="string"),
    _function("add_days", "Adds days to a date.", date="string", days="integer"),
    _function("look_up", "Finds a town in a table.", town="string", column="string"),
)
"""The functions, as OpenAI's API describes them."""


@dataclass(frozen=True)
class ToolRequest:
    """A user's question, and the call that answers it: the name of a function and its arguments."""

    question: str
    name: str
    arguments: Mapping[str, Any]


def call_function(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the result of a call. Raises `ValueError`, `KeyError` or `TypeError` for wrong arguments."""
    if name == "convert_unit":
        unit, target = arguments["unit"], arguments["target"]
        factor = FACTORS[unit, target] if (unit, target) in FACTORS else 1 / FACTORS[target, unit]
        return f"{arguments['value'] * factor:.2f}"
    if name == "add_days":
        return str(date.fromisoformat(arguments["date"]) + timedelta(days=arguments["days"]))
    if name == "look_up" and arguments["town"] in TOWNS and arguments["column"] in COLUMNS:
        return str(derive_seed(0, "tools", arguments["town"], arguments["column"]) % 9000 + 100)
    raise ValueError(f"{name} cannot be called with {dict(arguments)}")


def draw_request(dice: random.Random, split: Split) -> ToolRequest:
    """Returns a random request about a value, a day or a town of the split."""

    def key(draw: Any) -> Any:
        while True:
            value = draw()
            is_heldout = derive_seed(0, "tools", "split", str(value)) / 2**63 < HELDOUT
            if is_heldout == (split == "heldout"):
                return value

    kind = dice.randrange(3)
    if kind == 0:
        value = key(lambda: dice.choice((dice.randint(2, 999), dice.randint(11, 9999) / 10)))
        unit, target = dice.choice(tuple(FACTORS))[:: dice.choice((1, -1))]
        forms = ("How many {1} are {2} {0}?", "Convert {2} {0} to {1}.", "What is {2} {0} in {1}?")
        question = dice.choice(forms).format(unit, target, value)
        return ToolRequest(question, "convert_unit", {"value": value, "unit": unit, "target": target})
    if kind == 1:
        first = date(1950, 1, 1)
        day = str(key(lambda: first + timedelta(days=dice.randrange(36_525))))
        days = dice.randint(2, 365) * dice.choice((1, -1))
        forms = (
            "Which day is {0} days {1} {2}?",
            "What date is {0} days {1} {2}?",
            "Give me the date {0} days {1} {2}.",
        )
        question = dice.choice(forms).format(abs(days), "after" if days > 0 else "before", day)
        return ToolRequest(question, "add_days", {"date": day, "days": days})
    town, column = key(lambda: dice.choice(TOWNS)), dice.choice(COLUMNS)
    forms = ("What is the {0} of {1}?", "Look up the {0} of {1}.", "Tell me the {0} of {1}.")
    return ToolRequest(dice.choice(forms).format(column, town), "look_up", {"town": town, "column": column})


def tool_conversations() -> Iterator[Document]:
    """Yields conversations of five requests, always the same ones. Two or three of the functions are offered; a
    request for the third is declined, and thanks need no call.
    """
    for number in range(NUM_CONVERSATIONS):
        dice = random.Random(derive_seed(0, "tools", number))
        split: Split = "heldout" if number % round(1 / HELDOUT) == 0 else "train"
        tools = dice.sample(TOOLS, dice.choice((2, 3, 3)))
        offered = [tool["function"]["name"] for tool in tools]
        turns: list[Message] = []
        for place in range(NUM_REQUESTS):
            if place and dice.random() < 0.1:
                turns += [
                    {"role": "user", "content": "Thank you."},
                    {"role": "assistant", "content": "You are welcome."},
                ]
                continue
            asked = draw_request(dice, split)
            turns.append({"role": "user", "content": asked.question})
            if asked.name not in offered:
                turns.append({"role": "assistant", "content": "I have no function for that."})
                continue
            name = f"call{place}"
            function = {"name": asked.name, "arguments": dict(asked.arguments)}
            result = call_function(asked.name, asked.arguments)
            unit = f" {asked.arguments['target']}" if asked.name == "convert_unit" else ""
            turns += [
                {"role": "assistant", "content": "",
                 "tool_calls": [{"id": name, "type": "function", "function": function}]},
                {"role": "tool", "content": result, "name": asked.name, "tool_call_id": name},
                {"role": "assistant", "content": f"It is {result}{unit}."},
            ]  # fmt: skip
        meta = {"messages": turns, "tools": tools}
        yield Document(id=f"tools:{number}", text=join_turns(turns), kind="qa", split=split, source="tools", meta=meta)


CORPUS = NamedCorpus(read=lambda **_: tool_conversations(), title="made conversations with calls")
