"""Constrained output: what a request asks for as a grammar of `llguidance`, compiled within bounds, and the tokens that
the grammar allows at each step.
"""

import asyncio
import functools
import graphlib
import importlib.util
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.serve.errors import ApiError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_DEPTH = 64
"""Nesting of a JSON schema."""

MAX_NODES = 5_000
"""Objects, lists and values of a JSON schema."""

MAX_GRAMMAR_CHARACTERS = 65_536

MAX_COMPILATIONS = 2
"""Grammars compiled at once; each has a thread for about as long as its fuel lasts."""

COMPILE_TIMEOUT_S = 5.0
"""For waiting and compiling. Compiling alone ends within a fraction of it: llguidance counts its work ("fuel")."""

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Free white space lets a small model write blanks until its limit."""


@dataclass(frozen=True)
class GrammarSource:
    """What the answer must be: a JSON schema or a regular expression, a Lark grammar. param: the field that asks."""

    kind: Literal["json", "regex", "lark"]
    text: str
    param: str


def json_source(schema: Any, param: str) -> GrammarSource:
    """Raises `ApiError` 400 for a schema that is too large, too deep or recursive."""
    if not isinstance(schema, (dict, bool)):
        raise _bad(param, "a JSON schema must be an object")
    _check_size(schema, param)
    _check_references(schema, param)
    return GrammarSource("json", json.dumps(schema), param)


class GrammarConstraint:
    """A grammar's state in one sequence; see `TokenConstraint`."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> Tensor:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
        if self._matcher.is_error() or not bits.any():
            raise ConfigError("the grammar became too complex or allows no token; simplify it")
        return torch.from_numpy(bits.astype(np.bool_))

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)  # what it does not accept shows in the next call of `allowed`


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar from which each sequence gets a state of its own."""

    source: GrammarSource
    matcher: "LLMatcher"
    vocab_size: int

    def constraint(self) -> GrammarConstraint:
        return GrammarConstraint(self.matcher.deep_copy(), self.vocab_size)


class GrammarCompiler:
    """Compiles for one tokenizer. definition: the text of its `tokenizer.json`; stop_ids: tokens that end an answer."""

    def __init__(self, definition: str, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._definition = definition
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)
        self._lock = threading.Lock()
        self._places = asyncio.Semaphore(MAX_COMPILATIONS)

    async def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Raises `ApiError` 400 for a grammar that is malformed or takes too long, and if llguidance is absent."""
        if importlib.util.find_spec("llguidance") is None:
            text = "constrained output needs llguidance, which the server lacks; its operator can install"
            raise _bad(source.param, f"{text} modelwright[structured]")
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S), self._places:
                return await asyncio.to_thread(self.compile_now, source)
        except TimeoutError:
            raise _bad(source.param, f"compiling takes more than {COMPILE_TIMEOUT_S:g} s; simplify it") from None

    def compile_now(self, source: GrammarSource) -> CompiledGrammar:
        """Compile in this thread, for as long as it takes. Raises like `compile`."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _grammar(source)
        except ValueError as error:
            raise _bad(source.param, str(error)[:300]) from None
        limits = LLParserLimits(verbose_errors=False)
        with self._lock:  # two threads must not both make the tokenizer
            tokenizer = self._tokenizer
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _bad(source.param, matcher.get_error().strip().splitlines()[0][:300])
        return CompiledGrammar(source, matcher, self._vocab_size)

    @functools.cached_property
    def _tokenizer(self) -> "LLTokenizer":
        """Made with the first grammar: it takes a second for a large vocabulary."""
        from llguidance import LLTokenizer

        return LLTokenizer(self._definition, n_vocab=self._vocab_size, eos_token=self._stop_ids)


def _grammar(source: GrammarSource) -> str:
    from llguidance import LLMatcher

    if source.kind == "json":
        return LLMatcher.grammar_from_json_schema(source.text, overrides=cast(Any, JSON_FORM))
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    return LLMatcher.grammar_from_lark(source.text)


def _bad(param: str, reason: str) -> ApiError:
    return ApiError(
        400, f"Invalid value for {param!r}: {reason}.", param=param.partition(".")[0], code="invalid_grammar"
    )


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return cast(Mapping[str, Any], node).values()
    return cast(list[Any], node) if isinstance(node, list) else ()


def _check_size(schema: Any, param: str) -> None:
    """Level by level, because a recursion would end with the interpreter's stack."""
    level, num_nodes = [schema], 0
    for _ in range(MAX_DEPTH):
        num_nodes += len(level)
        if num_nodes > MAX_NODES:
            raise _bad(param, f"the schema has more than {MAX_NODES} values; split it")
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise _bad(param, f"the schema is nested deeper than {MAX_DEPTH} levels; flatten it")


def _check_references(schema: Any, param: str) -> None:
    """Refuse references that lead back to where they stand: no bound on the answer's depth would follow from them."""
    graph: dict[str, set[str]] = {}
    waiting = {"#"}
    while waiting:
        pointer = waiting.pop()
        graph[pointer] = _references(_at(schema, pointer, param))
        waiting |= graph[pointer] - graph.keys()
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pointer = error.args[1][0]
        raise _bad(param, f"the schema is recursive through {pointer[:80]!r}; write it out to a fixed depth") from None


def _references(node: Any) -> set[str]:
    """All local references below a node."""
    found, waiting = set[str](), [node]
    while waiting:
        one = waiting.pop()
        reference = one.get("$ref") if isinstance(one, dict) else None
        if isinstance(reference, str):
            found.add(reference)
        waiting += [child for child in _children(one) if not _holds_definitions(one, child)]
    return found


def _holds_definitions(node: Any, child: Any) -> bool:
    """Definitions count where they are referred to, not where they stand."""
    return isinstance(node, dict) and any(child is node.get(name) for name in ("$defs", "definitions"))


def _at(schema: Any, pointer: str, param: str) -> Any:
    """The part of a schema at a pointer such as `#/$defs/tree`."""
    if not pointer.startswith("#"):
        raise _bad(param, f"the reference {pointer[:80]!r} leads out of the schema; only local ones are followed")
    node = schema
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            raise _bad(param, f"the reference {pointer[:80]!r} leads nowhere")
    return node
