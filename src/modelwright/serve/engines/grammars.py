"""Constrained output: grammars, compiled by `llguidance` within bounds, and the tokens that they allow at each step."""

import asyncio
import graphlib
import importlib.util
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import tokenizers
import torch
from torch import Tensor

from modelwright.core.config import ConfigError
from modelwright.infer.sequence import TokenConstraint
from modelwright.serve.agents.calls import JSON_FORM
from modelwright.serve.agents.reasoning import END_THINK
from modelwright.serve.errors import ApiError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_DEPTH = 64
"""Deepest nesting of a JSON schema."""
MAX_NODES = 5_000
"""Most objects, lists and values of a JSON schema."""
MAX_GRAMMAR_CHARACTERS = 65_536

_INSIDE = ("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems")
"""Keywords of a schema whose schemas describe a value inside the value."""

MAX_COMPILATIONS = 2
"""Most grammars that are compiled at once. Each occupies a thread until it is compiled or out of fuel."""
COMPILE_TIMEOUT_S = 5.0
"""Limit on waiting and compiling. Compiling alone takes a fraction of it, because llguidance limits its work ("fuel").
"""


@dataclass(frozen=True)
class Thought:
    """A thought before the answer. begin, end: tokens of its marks; is_open: the prompt has opened it; budget: tokens
    after which it is closed, -1 without a limit.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool
    budget: int = -1


@dataclass(frozen=True)
class GrammarSource:
    """The form of an answer: a JSON schema, a regular expression, a Lark grammar, or "any" after a thought.
    param: field of the request.
    """

    kind: Literal["json", "regex", "lark", "any"]
    text: str
    param: str
    thought: "Thought | None" = None
    """The grammar begins after the thought."""


def source_of(data: Mapping[str, Any]) -> GrammarSource:
    """Restores a source from `asdict`, also after JSON has made lists of tuples."""
    one = data["thought"]
    thought = {**one, "begin": tuple(one["begin"]), "end": tuple(one["end"])} if one else None
    return GrammarSource(**{**data, "thought": Thought(**thought) if thought else None})


def check_schema(schema: Any, param: str) -> None:
    """Raises `ApiError` 400 for a schema that is too large or too deep for the code that follows, which recurses."""
    if not isinstance(schema, (dict, bool)):
        raise _bad(param, "a JSON schema must be an object")
    # level by level, because a recursion would exhaust the interpreter's stack
    level, num_nodes, depth = [schema], 0, 0
    while level:
        num_nodes, depth = num_nodes + len(level), depth + 1
        if depth > MAX_DEPTH:
            raise _bad(param, f"the schema is nested deeper than {MAX_DEPTH} levels; flatten it")
        if num_nodes > MAX_NODES:
            raise _bad(param, f"the schema has more than {MAX_NODES} values; split it")
        level = [child for node in level for child in _children(node)]


def json_source(schema: Any, param: str) -> GrammarSource:
    """Returns the grammar of a schema. Raises `ApiError` 400 for a schema that is too large, too deep or endless."""
    check_references(schema, param)
    return GrammarSource("json", json.dumps(schema), param)


def check_references(schema: Any, param: str) -> None:
    """Raises like `check_schema`, and for references that lead nowhere, or back to themselves without a value between.
    Through a property or an item a schema may contain itself: the limit on tokens bounds the depth of the answer.
    """
    check_schema(schema, param)
    graph: dict[str, set[str]] = {}
    waiting = {"#"}
    while waiting:
        pointer = waiting.pop()
        # the part of the schema at the pointer, such as `#/$defs/tree`
        if not pointer.startswith("#"):
            raise _bad(param, f"the reference {pointer[:80]!r} leads out of the schema; only local ones are followed")
        node = schema
        for step in pointer.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdigit() and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, dict) and name in node:
                node = node[name]
            else:
                raise _bad(param, f"the reference {pointer[:80]!r} leads nowhere")
        # all local references below it; in the graph only those at the same place of the answer
        graph[pointer], parts = set(), [(node, True)]
        while parts:
            part, is_here = parts.pop()
            reference = part.get("$ref") if isinstance(part, dict) else None
            if isinstance(reference, str):
                (graph[pointer] if is_here else waiting).add(reference)
            # definitions count at the references to them, not at their own place
            definitions = [part.get(name) for name in ("$defs", "definitions")] if isinstance(part, dict) else []
            inside = [part.get(name) for name in _INSIDE] if isinstance(part, dict) else []
            parts += [
                (child, is_here and not any(child is one for one in inside))
                for child in _children(part)
                if not any(child is one for one in definitions)
            ]
        waiting = (waiting | graph[pointer]) - graph.keys()
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pointer = error.args[1][0]
        raise _bad(param, f"the schema refers to itself through {pointer[:80]!r} without a value between") from None


@dataclass(eq=False)
class GrammarConstraint:
    """A grammar's state in one sequence; see `TokenConstraint`."""

    _matcher: "LLMatcher"
    _vocab_size: int

    def allowed(self) -> Tensor:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
        if self._matcher.is_error() or not bits.any():
            raise ConfigError("the grammar became too complex or allows no token; simplify it")
        return torch.from_numpy(bits.astype(np.bool_))

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)  # the next call of `allowed` shows if it was rejected


@dataclass(eq=False)
class ThoughtConstraint:
    """Lets a sequence think freely, closes the thought at its budget, and then follows the grammar, if there is one."""

    _thought: Thought
    _grammar: "CompiledGrammar"
    _answer: GrammarConstraint | None
    """None once what was written can be no answer, and without a grammar."""
    _state: Literal["before", "inside", "after"] = "before"
    _num_begun: int = 0
    """Tokens of the first mark so far. A mark of several tokens may begin like an answer (`<think>`, `<tool_call>`), so
    both are followed until one of them is excluded."""
    _tail: str = ""
    _num_tokens: int = 0
    _num_closed: int = 0

    def __post_init__(self) -> None:
        self._state = "inside" if self._thought.is_open else "before"

    def allowed(self) -> Tensor:
        thought, size, has_grammar = self._thought, self._grammar.vocab_size, self._grammar.matcher is not None
        if self._state == "inside":
            if 0 <= thought.budget <= self._num_tokens:
                return torch.arange(size) == thought.end[self._num_closed]
            free = torch.ones(size, dtype=torch.bool)
            # an answer in the form of a grammar must still come
            free[[token for token in self._grammar.stop_ids if has_grammar]] = False
            return free
        allowed = self._answer.allowed() if self._answer is not None else torch.full((size,), not has_grammar)
        if self._state == "before":
            allowed[thought.begin[self._num_begun]] = True
        return allowed

    def advance(self, token_id: int) -> None:
        thought = self._thought
        if self._state == "inside":
            if 0 <= thought.budget <= self._num_tokens:
                self._num_closed += 1
            else:
                self._num_tokens += 1
            # by its text, because the token before the mark may contain its beginning
            self._tail = self._tail[-len(END_THINK) :] + self._grammar.text_of(token_id)
            if END_THINK in self._tail:
                self._state, self._answer = "after", self._grammar.answer()
            return
        if self._state == "before" and token_id == thought.begin[self._num_begun]:
            self._num_begun += 1
            if self._num_begun == len(thought.begin):
                self._state = "inside"
                return
            if self._answer is not None and not self._answer.allowed()[token_id]:
                self._answer = None
        else:
            self._state = "after"
        if self._answer is not None:
            self._answer.advance(token_id)


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar, which creates a separate state for each sequence. text_of: returns the text of a token."""

    source: GrammarSource
    matcher: "LLMatcher | None"
    vocab_size: int
    stop_ids: Sequence[int]
    text_of: Callable[[int], str]

    def answer(self) -> GrammarConstraint | None:
        """Returns the state at the beginning of an answer; None without a grammar."""
        return GrammarConstraint(self.matcher.deep_copy(), self.vocab_size) if self.matcher else None

    def constraint(self) -> TokenConstraint:
        answer = self.answer()
        if self.source.thought is not None:
            return ThoughtConstraint(self.source.thought, self, answer)
        assert answer is not None, "free text has no grammar"
        return answer


class GrammarCompiler:
    """Compiles grammars. definition: text of the `tokenizer.json`; stop_ids: tokens that end an answer."""

    def __init__(self, definition: str, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._definition = definition
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._places = asyncio.Semaphore(MAX_COMPILATIONS)

    async def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compiles in another thread. Raises `ApiError` 400 for a malformed or slow grammar, and without llguidance."""
        if source.kind == "any":
            return self.compile_now(source)
        if importlib.util.find_spec("llguidance") is None:
            text = "constrained output needs llguidance, which the server lacks; its operator can install"
            raise _bad(source.param, f"{text} modelwright[structured]")
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S), self._places:
                return await asyncio.to_thread(self.compile_now, source)
        except TimeoutError:
            raise _bad(source.param, f"compiling takes more than {COMPILE_TIMEOUT_S:g} s; simplify it") from None

    def compile_now(self, source: GrammarSource) -> CompiledGrammar:
        """Compiles in this thread, without a time limit. Raises like `compile`."""
        if source.kind == "any":
            return CompiledGrammar(source, None, self._vocab_size, self._stop_ids, self._text_of)
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        try:
            if source.kind == "json":
                grammar = LLMatcher.grammar_from_json_schema(source.text, overrides=cast(Any, JSON_FORM))
            elif source.kind == "regex":
                grammar = LLMatcher.grammar_from_regex(source.text)
            else:
                grammar = LLMatcher.grammar_from_lark(source.text)
        except ValueError as error:
            raise _bad(source.param, str(error)[:300]) from None
        limits = LLParserLimits(verbose_errors=False)
        with self._lock:
            # made with the first grammar, because it takes a second for a large vocabulary
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._definition, n_vocab=self._vocab_size, eos_token=self._stop_ids)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _bad(source.param, matcher.get_error().strip().splitlines()[0][:300])
        return CompiledGrammar(source, matcher, self._vocab_size, self._stop_ids, self._text_of)

    def _text_of(self, token_id: int) -> str:
        return self._texts.decode([token_id], skip_special_tokens=False)

    @cached_property
    def _texts(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._definition)


def _bad(param: str, reason: str) -> ApiError:
    return ApiError(
        400, f"Invalid value for {param!r}: {reason}.", param=param.partition(".")[0], code="invalid_grammar"
    )


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return cast(Mapping[str, Any], node).values()
    return cast(list[Any], node) if isinstance(node, list) else ()
