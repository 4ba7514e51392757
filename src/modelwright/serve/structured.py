"""Fields that constrain the form of an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from modelwright.serve.engines.grammars import MAX_GRAMMAR_CHARACTERS, GrammarSource, choice_source, json_source
from modelwright.serve.errors import ApiError
from modelwright.serve.fields import Strict

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class JsonSchemaFormat(Strict):
    """A JSON schema with a name. Answers keep to it whether `strict` or not."""

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
        """The grammar; None for plain text. Raises `ApiError`."""
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
        """Raises `ApiError`."""
        param = "structured_outputs"
        if self.json_schema is not None:
            return json_source(self.json_schema, param)
        if self.choice is not None:
            return choice_source(self.choice, param)
        if self.regex is not None:
            return GrammarSource("regex", self.regex, param)
        return GrammarSource("lark", self.grammar or "", param)


def only_source(sources: list[GrammarSource | None]) -> GrammarSource | None:
    """The one grammar of a request, None if there is none. Raises `ApiError` 400 for several."""
    given = [source for source in sources if source is not None]
    if len(given) > 1:
        text = f"{given[0].param} and {given[1].param} cannot be combined; give one of them."
        raise ApiError(400, text, param=given[1].param, code="invalid_value")
    return given[0] if given else None
