"""Chat templates: messages to one text, and which parts of the text the assistant speaks.

Templates are Jinja, rendered in a sandbox with the settings and helpers that `transformers` uses, so a template gives
the same text in both. Special tokens that a user writes into a message are shielded: they stay plain text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modelwright.core.errors import DataError
from modelwright.data.document import Message

DEFAULT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('a role must be system, user or assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHIELD = "\ufdd0"
"""A code point that Unicode keeps out of texts; put into special tokens that a message holds."""


@dataclass(frozen=True)
class TextSpan:
    """A part of a rendered conversation; `spoken` when the assistant says it (its end token included)."""

    text: str
    spoken: bool


class ChatTemplate:
    """A compiled template with the special tokens that it may name (`bos_token`, `eos_token`)."""

    def __init__(self, source: str, special_tokens: dict[str, str], shielded: Sequence[str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._shielded = [token for token in shielded if len(token) > 1]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"the tokenizer's chat template is not valid Jinja ({error}); fix chat_template") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as one text; special tokens inside contents carry the `SHIELD`.

        Raises `DataError` when the template refuses the messages (an unknown role, a wrong order).
        """
        turns = [{**turn, "content": self._shield(turn["content"])} for turn in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template rejects these messages: {error}") from None

    def spans(self, messages: Sequence[Message]) -> list[TextSpan]:
        """The conversation split where the assistant's turns begin and end; the joined texts are the rendering. Raises
        `DataError` if an earlier turn's rendering depends on a later one, so that there is no such split.
        """
        answers = self._answers(messages)
        if not _is_chain(answers):
            raise DataError("the chat template renders earlier turns differently once later ones follow; split them")
        done, spans = _joined(answers)
        whole = self.render(messages, add_generation_prompt=False)
        return [*spans, TextSpan(whole[len(done) :], False)] if len(whole) > len(done) else spans

    def training_spans(self, messages: Sequence[Message]) -> list[list[TextSpan]]:
        """The texts to learn a conversation from, up to its last answer: one with all answers, or one for each answer
        where the template renders earlier turns differently once later ones follow (Qwen3's leaves reasoning out)."""
        answers = self._answers(messages)
        return [_joined(answers)[1]] if _is_chain(answers) else [_joined([answer])[1] for answer in answers]

    def completion_spans(self, messages: Sequence[Message], first: int) -> list[TextSpan]:
        """The text in which the turns from number `first` on, an answer, continue the turns before. Only these answers
        are spoken; of several the last one alone, where the template renders earlier turns differently once later ones
        follow.
        """
        answers = self._answers(messages, first=first)
        return _joined(answers if _is_chain(answers) else answers[-1:])[1]

    def _answers(self, messages: Sequence[Message], *, first: int = 0) -> list[tuple[str, str]]:
        """For each turn of the assistant from number `first` on the rendering up to where it is to speak, and up to the
        end of its answer.
        """
        answers = []
        for number, turn in enumerate(messages):
            if number >= first and turn["role"] == "assistant":
                prompt = self.render(messages[:number], add_generation_prompt=True)
                answered = self.render(messages[: number + 1], add_generation_prompt=False)
                if not answered.startswith(prompt):
                    raise DataError(
                        "the chat template's generation prompt differs from the start of its rendered answer"
                    )
                answers.append((prompt, answered))
        return answers

    def _shield(self, text: str) -> str:
        for token in self._shielded:
            if token in text:
                text = text.replace(token, token[0] + SHIELD + token[1:])
        return text


def _is_chain(answers: Sequence[tuple[str, str]]) -> bool:
    """Whether each prompt continues the previous answer."""
    return all(prompt.startswith(answered) for (_, answered), (prompt, _) in pairwise(answers))


def _joined(answers: Sequence[tuple[str, str]]) -> tuple[str, list[TextSpan]]:
    """The rendering up to the last answer, whole and in spans."""
    done, spans = "", []
    for prompt, answered in answers:
        spans += [TextSpan(prompt[len(done) :], False), TextSpan(answered[len(prompt) :], True)]
        done = answered
    return done, spans


def unshield(text: str) -> str:
    """Undo the shielding of `ChatTemplate.render`."""
    return text.replace(SHIELD, "") if SHIELD in text else text


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what the assistant says in some templates. Ignored here:
    `spans` finds the same parts by rendering.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's protocol

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return caller()


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
