"""A tiny random model, a tiny tokenizer with a chat template, and servers over them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from modelwright.compress.int8 import Int8Config, quantize_model, save_int8
from modelwright.infer.engine import EngineConfig
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.serve.codec import Codec
from modelwright.serve.config import ServeConfig
from modelwright.serve.server import ServerThread

SPECIALS = ["<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "what does this do? it copies a tree of files",
    "größer — 日本語 🙂",
]


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def make_codec() -> Codec:
    return Codec(make_tokenizer(), chat_template=TEMPLATE, names={"eos_token": "<|eos|>"}, stop_ids=[1])


def make_model(max_seq_len: int = 512) -> Decoder:
    """Random weights; control tokens are made unlikely, so that greedy answers run to their limit."""
    config = ModelConfig(
        vocab_size=336, num_layers=2, model_dim=48, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=96,
        max_seq_len=max_seq_len, init_std=0.2, tie_embeddings=False,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(7)
    assert model.head is not None
    model.head.weight.data[: len(SPECIALS)] = 0
    model.head.weight.data[330:] = 0
    return model.eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    config = ServeConfig(port=0, max_queue=64, max_body_bytes=20_000)
    with ServerThread(make_model(), make_codec(), config, model_name="tiny") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerThread) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as openai:
        yield openai


@pytest.fixture
def slow_server() -> Iterator[Callable[..., ServerThread]]:
    """Makes servers whose answers can take seconds: a long context, one answer at a time unless told otherwise."""
    started: list[ServerThread] = []

    def make(**settings) -> ServerThread:
        engine = EngineConfig(max_running=settings.pop("max_running", 1))
        config = ServeConfig(port=0, engine=engine, **settings)
        started.append(ServerThread(make_model(2048), make_codec(), config, model_name="tiny").start())
        return started[-1]

    yield make
    for server in started:
        server.stop_soon(at_once=True)
        assert server.join(20)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that the server can load."""
    folder = tmp_path / "model"
    save_int8(quantize_model(make_model(320), Int8Config()), folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|eos|>"}')
    return folder
