"""Chat in the terminal with a model folder, without a server."""

import secrets
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.load import IncrementalDetokenizer, ServedTokenizer, expectation, load_folder

HELP = "Type a question and press Enter. /new starts over, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer, or leaves."

ANSWER_ROOM = 4
"""The prompt leaves at least 1 / `ANSWER_ROOM` of the context for the answer; the oldest turns are dropped for it."""


@dataclass
class Conversation:
    """A conversation with a model: keeps the turns, and drops the oldest when the context is full."""

    _engine: Engine
    _tokenizer: ServedTokenizer
    _params: SamplingParams
    messages: list[dict[str, str]] = field(default_factory=list)
    tools: Sequence[Any] = ()
    """JSON schemas of functions that the template shows; a call of one is text."""
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables of the template, such as `enable_thinking`."""

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yields pieces of the answer. Closing the generator stops the answer and keeps the text so far."""
        self.messages.append({"role": "user", "content": question})
        limit = self._engine.max_seq_len - self._engine.max_seq_len // ANSWER_ROOM
        encode = partial(self._tokenizer.encode_chat, tools=self.tools, variables=self.variables)
        prompt = encode(self.messages)
        while len(prompt) > limit and len(self.messages) > 1:
            # a question goes with its answer, because templates expect the roles to alternate
            del self.messages[: 2 if len(self.messages) > 2 else 1]
            prompt = encode(self.messages)
        prompt = prompt[-limit:]
        text = IncrementalDetokenizer(self._tokenizer.stream())
        params = replace(self._params, stop_ids=self._tokenizer.stop_ids, max_tokens=self._engine.max_seq_len)
        params = replace(params, seed=secrets.randbits(62))
        answer: list[str] = []
        self._engine.add("terminal", prompt, params)
        try:
            while self._engine.has_work:
                for output in self._engine.step():
                    is_last = output.finish_reason in ("stop", "error")
                    piece = "" if is_last else text.push(output.token_id, output.logprob, ()).text
                    piece += text.finish("stop").text if output.finished else ""
                    answer.append(piece)
                    yield piece
        finally:
            self._engine.abort("terminal")
            self.messages.append({"role": "assistant", "content": "".join(answer)})


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def chat(
    folder: Path, params: SamplingParams, *, tools: Sequence[Any] = (), variables: Mapping[str, Any] | None = None,
    read: Callable[[str], str] = input, write: Callable[[str], object] = _write,
) -> None:  # fmt: skip
    """Reads questions and writes answers until the end of input. Ctrl-C ends an answer, and raises `KeyboardInterrupt`
    elsewhere. Raises `ModelError` if the folder cannot be loaded.
    """
    model, tokenizer = load_folder(folder, Int8WeightsConfig())
    # the cache is allocated in blocks of 16 tokens
    engine = Engine(model, EngineConfig(max_num_seqs=1, kv_cache_tokens=-(-model.config.max_seq_len // 16) * 16))
    begin = partial(Conversation, engine, tokenizer, params, tools=tools, variables=variables or {})
    conversation = begin()
    hint = expectation(model.config.num_parameters)
    write("\n".join([HELP, *([hint] if hint else []), ""]))
    while True:
        try:
            question = read("\n> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            raise
        if question == "/exit":
            return
        if question == "/new":
            conversation = begin()
        elif question:
            pieces = conversation.ask(question)
            try:
                for piece in pieces:
                    write(piece)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                write(" [stopped]")
            finally:
                pieces.close()  # aborts the engine's work; the garbage collector might do so only later
            write("\n")
