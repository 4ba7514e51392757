"""Small stand-ins: a tokenizer whose tokens are bytes, documents, a tiny decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from modelwright.model.decoder import Decoder, ModelConfig


class ByteTokenizer:
    """Token ids are UTF-8 bytes; 256 starts a text, 257 and 258 begin a user's and an assistant's turn."""

    bos_id = 256
    eos_id = 256
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8")

    @property
    def chat(self) -> "ByteTokenizer":
        return self

    def encode_prompt(self, messages: Sequence[Mapping[str, str]], **_: Any) -> list[int]:
        ids = [self.bos_id]
        for message in messages:
            ids += [257 if message["role"] == "user" else 258, *message["content"].encode("utf-8")]
        return [*ids, 258]

    def encode_training_chats(self, messages: Sequence[Mapping[str, str]], **_: Any) -> list[Any]:
        prompt, answer = self.encode_prompt(messages[:-1]), [*self.encode(messages[-1]["content"]), self.eos_id]
        return [(np.array([*prompt, *answer]), np.array([0] * len(prompt) + [1] * len(answer), dtype=np.uint8))]


@dataclass(frozen=True, kw_only=True)
class FakeDocument:
    id: str
    text: str
    kind: str = "prose"
    source: str = "fake"
    meta: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] = ()
    is_undesirable: bool = False
    has_answer: bool = True

    @property
    def messages(self) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": self.meta["question"]},
            {"role": "assistant", "content": self.meta["answer"]},
        ]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def make_document() -> type[FakeDocument]:
    return FakeDocument


@pytest.fixture
def model() -> Decoder:
    config = ModelConfig(
        vocab_size=ByteTokenizer.vocab_size,
        num_layers=2,
        model_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=48,
        max_seq_len=32,
        init_std=0.3,
    )
    decoder = Decoder(config)
    decoder.init_weights(7)
    return decoder
