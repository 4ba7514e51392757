"""Fields that constrain the form of an answer: OpenAI's `response_format`, vLLM's `structured_outputs`, and functions
that a model may call, with the grammar of a forced call and its parser.

Only forced calls are supported (`tool_choice` "required" or a function), because the grammar determines their form for
any model. A model that decides whether to call would have to be trained with one particular notation.
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from modelwright.serve.api.fields import Strict
from modelwright.serve.engines.grammars import MAX_GRAMMAR_CHARACTERS, GrammarSource, check_schema, json_source

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Strict):
    """A function. `parameters`: JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": False} if self.parameters is None else self.parameters


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(Strict):
    name: FunctionName


class NamedTool(Strict):
    """A function that must be called."""

    type: Literal["function"]
    function: FunctionReference


class FunctionCall(Strict):
    name: FunctionName
    arguments: str


class ToolCall(Strict):
    """A call in an earlier turn of the assistant."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def plain(self) -> str:
        """Returns the call in the form in which the model writes it."""
        return f'{{"name": {json.dumps(self.function.name)}, "arguments": {self.function.arguments}}}'


@dataclass(frozen=True)
class ForcedCall:
    """The functions of which an answer has to call one. With a single named one the answer is its arguments alone."""

    functions: tuple[FunctionDefinition, ...]
    is_named: bool

    def source(self) -> GrammarSource:
        """Returns the grammar of the answer. Raises `ApiError`."""
        if self.is_named:
            return json_source(self.functions[0].schema_of_arguments, "tools")
        definitions: dict[str, Any] = {}
        calls = []
        for number, function in enumerate(self.functions):
            check_schema(function.schema_of_arguments, "tools")
            # each schema refers to itself by "#", which is the combined schema now
            root = f"#/$defs/{number}"
            definitions[str(number)] = _moved(function.schema_of_arguments, root)
            properties = {"name": {"const": function.name}, "arguments": {"$ref": root}}
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                }
            )
        return json_source({"anyOf": calls, "$defs": definitions}, "tools")


@dataclass(frozen=True)
class CallDelta:
    """A part of a call: the name, once, and a piece of the arguments. Both may be empty."""

    name: str = ""
    arguments: str = ""


@dataclass
class CallText:
    """Parses the text of a forced call piece by piece. call_id: id by which the client refers to the call."""

    call: ForcedCall
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    name: str = ""
    _held: str = ""

    def push(self, text: str) -> CallDelta:
        """Returns the part of the call that `text` adds."""
        self._held += text
        name = ""
        if not self.name and self.call.is_named:
            name = self.call.functions[0].name
        elif not self.name:
            for function in self.call.functions:
                head = f'{{"name": {json.dumps(function.name)}, "arguments": '
                if self._held.startswith(head):
                    name, self._held = function.name, self._held.removeprefix(head)
                    break
        self.name = self.name or name
        if not self.name:
            return CallDelta()
        # the last character is held back, because it may be the brace that closes the call and not the arguments
        keep = 0 if self.call.is_named else 1
        end = max(0, len(self._held) - keep)
        arguments, self._held = self._held[:end], self._held[end:]
        return CallDelta(name, arguments)


def _moved(node: Any, root: str) -> Any:
    """Returns a copy of a schema with its local references moved below `root`."""
    if isinstance(node, list):
        return [_moved(entry, root) for entry in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(value, root) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference.removeprefix("#")
    return moved


GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class JsonSchemaFormat(Strict):
    """A JSON schema with a name. Answers conform to it with and without `strict`."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        return self

    def source(self) -> GrammarSource | None:
        """Returns the grammar, or None for plain text. Raises `ApiError`."""
        if self.type == "text":
            return None
        schema = self.json_schema.json_schema if self.json_schema else None
        return json_source({"type": "object"} if schema is None else schema, "response_format")


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of a JSON schema, a regular expression, a list of texts, a Lark grammar."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Annotated[list[GrammarText], Field(min_length=1, max_length=1024)] | None = None
    grammar: GrammarText | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "StructuredOutputs":
        if sum(value is not None for value in (self.json_schema, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("give exactly one of json, regex, choice and grammar")
        return self

    def source(self) -> GrammarSource:
        """Returns the grammar. Raises `ApiError`."""
        param = "structured_outputs"
        if self.json_schema is not None:
            return json_source(self.json_schema, param)
        if self.choice is not None:
            texts = [json.dumps(text, ensure_ascii=False) for text in self.choice]
            return GrammarSource("lark", f"start: {' | '.join(texts)}", param)
        if self.regex is not None:
            return GrammarSource("regex", self.regex, param)
        return GrammarSource("lark", self.grammar or "", param)
