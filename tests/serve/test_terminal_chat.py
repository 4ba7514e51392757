"""Chat in the terminal."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.config import ModelError
from modelwright.infer.engine import Engine
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.server import ServerThread
from modelwright.serve.terminal import HELP, Conversation, chat


def script(*lines: str):
    remaining = list(lines)

    def read(prompt: str) -> str:
        if not remaining:
            raise EOFError
        return remaining.pop(0)

    return read


def small_engine(server: ServerThread) -> Engine:
    model = copy.copy(server.service.worker.client.engine._runner._model)
    model.config = replace(model.config, max_seq_len=200)
    return Engine(model, server.service.worker.client.engine.config)


def test_chat_answers_and_leaves(model_folder: Path):
    written: list[str] = []
    chat(
        model_folder,
        SamplingParams(),
        read=script("what does this do?", "", "/new", "the dog", "/exit", "unread"),
        write=written.append,
    )
    text = "".join(written)
    assert text.startswith(HELP)
    assert len(re.sub(r"\s", "", text)) > len(HELP)


def test_chat_ends_with_the_input(model_folder: Path):
    chat(model_folder, SamplingParams(), read=script(), write=lambda text: None)


def test_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match="no such model folder"):
        chat(tmp_path / "absent", SamplingParams(), read=script(), write=lambda text: None)


def test_old_turns_are_forgotten_when_the_context_is_full(server: ServerThread):
    engine = small_engine(server)
    conversation = Conversation(engine, server.service.model.tokenizer, SamplingParams(temperature=0))
    for _ in range(4):
        assert "".join(conversation.ask("the quick brown fox jumps over the lazy dog " * 5))
    assert conversation.messages[0]["role"] == "user"
    assert len(conversation.messages) < 8
    assert "".join(conversation.ask("dog " * 2000))


def test_tools_and_variables_reach_the_template(server: ServerThread, monkeypatch: pytest.MonkeyPatch):
    tokenizer, seen = server.service.model.tokenizer, []
    encode = type(tokenizer).encode_chat

    def watched(self, messages, **given):
        seen.append(given)
        return encode(self, messages)

    monkeypatch.setattr(type(tokenizer), "encode_chat", watched)
    given = {"tools": [{"name": "tide"}], "variables": {"enable_thinking": False}}
    conversation = Conversation(small_engine(server), tokenizer, SamplingParams(temperature=0, max_tokens=2), **given)
    next(conversation.ask("the quick"))
    assert seen == [given]


def test_stopping_an_answer_keeps_its_beginning(server: ServerThread):
    engine = small_engine(server)
    conversation = Conversation(engine, server.service.model.tokenizer, SamplingParams(temperature=0))
    pieces = conversation.ask("the quick")
    shown = next(pieces) + next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    assert not engine.has_work
