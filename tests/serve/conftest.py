"""A tiny random model, a tiny tokenizer with a chat template, and servers over them."""

import asyncio
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from modelwright.compress.int8 import Int8WeightsConfig, quantize_model, save_int8
from modelwright.data.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.infer.engine import EngineConfig
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf import save_model
from modelwright.serve.config import OWN_BACKEND, RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import BACKENDS, Backend, engine_in_thread
from modelwright.serve.engines.client import EngineClient
from modelwright.serve.load import ModelSource, ServedTokenizer, load_folder
from modelwright.serve.server import ServerThread

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "what does this do? it copies a tree of files",
    "größer — 日本語 🙂",
]


@lru_cache
def make_tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT * 3, TokenizerConfig(vocab_size=330))


def make_served_tokenizer() -> ServedTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer().save(Path(folder))
        return ServedTokenizer.load(Path(folder))


def make_model(max_seq_len: int = 512, *, seed: int = 7) -> Decoder:
    """Random weights; control tokens are made unlikely, so that greedy answers run to their limit."""
    config = ModelConfig(
        vocab_size=336, num_layers=2, model_dim=48, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=96,
        max_seq_len=max_seq_len, init_std=0.2, tie_embeddings=False,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(seed)
    assert model.head is not None
    model.head.weight.data[: len(SPECIAL_TOKENS)] = 0
    model.head.weight.data[make_tokenizer().vocab_size :] = 0
    return model.eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    config = ServeConfig(port=0, max_queued=64, max_body_bytes=20_000)
    with ServerThread(
        engine_in_thread(make_model(), config), make_served_tokenizer(), config, model_name="tiny"
    ) as running:
        yield running


@pytest.fixture
def engines_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of model folders compute in this process, where a test can hold their engines."""

    def load(source: ModelSource, config: ServeConfig) -> tuple[EngineClient, ServedTokenizer]:
        model, tokenizer = load_folder(source.folder, config.int8)
        return engine_in_thread(model, config), tokenizer

    monkeypatch.setitem(BACKENDS, OWN_BACKEND, Backend(load))  # type: ignore[arg-type]


@pytest.fixture(params=["fast", "plain"])
def stack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Servers with uvloop and httptools, or with asyncio and h11 as where those are not installed."""
    if request.param == "plain":
        monkeypatch.setattr("modelwright.serve.server.new_event_loop", asyncio.new_event_loop)
        monkeypatch.setattr("modelwright.serve.connections.HttpToolsProtocol", None)
    return request.param


@pytest.fixture(scope="module")
def client(server: ServerThread) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as openai:
        yield openai


@pytest.fixture
def slow_server() -> Iterator[Callable[..., ServerThread]]:
    """Makes servers whose answers can take seconds: a long context, one answer at a time unless told otherwise."""
    started: list[ServerThread] = []

    def make(**settings) -> ServerThread:
        chunk = settings.pop("prefill_chunk_size", 256)
        engine = EngineConfig(max_num_seqs=settings.pop("max_running", 1), prefill_chunk_size=chunk)
        requests = settings.pop("requests", RequestsConfig())
        config = ServeConfig(port=settings.pop("port", 0), engine=engine, **settings)
        client = engine_in_thread(make_model(2048), config)
        server = ServerThread(client, make_served_tokenizer(), config, model_name="tiny", requests=requests)
        started.append(server.start())
        return started[-1]

    yield make
    for server in started:
        server.stop_soon(at_once=True)
        assert server.join(120)


def write_model(folder: Path, *, seed: int) -> Path:
    """A folder in the Hugging Face layout that the server can load."""
    save_model(make_model(seed=seed), folder, eos_id=1)
    make_tokenizer().save(folder)
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that the server can load."""
    folder = tmp_path / "model"
    save_int8(quantize_model(make_model(320), Int8WeightsConfig()), folder)
    make_tokenizer().save(folder)
    return folder


@pytest.fixture
def free_port() -> int:
    """A port for what cannot take one by itself; another program could take it meanwhile."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
