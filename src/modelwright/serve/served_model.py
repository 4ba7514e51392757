"""One version of the model in service: its engine, tokenizer and limits."""

import hashlib
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelwright.infer.engine import Engine
from modelwright.model.decoder import Decoder
from modelwright.serve.config import ServeConfig
from modelwright.serve.engine_client import EngineClient, EngineInfo
from modelwright.serve.engine_thread import EngineThread
from modelwright.serve.grammars import GrammarCompiler
from modelwright.serve.limits import Limits
from modelwright.serve.load import ModelSource, load_folder
from modelwright.serve.metrics import Metrics
from modelwright.serve.tokenizer import Codec
from modelwright.serve.worker import EngineWorker

FINGERPRINT_LEN = 12


@dataclass(frozen=True)
class ServedModel:
    """A model with a running worker. `source`: where it comes from, None for one that exists in memory only."""

    worker: EngineWorker
    codec: Codec
    limits: Limits
    grammars: GrammarCompiler
    source: ModelSource | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def info(self) -> EngineInfo:
        return self.worker.client.info

    @property
    def fingerprint(self) -> str:
        """The version: of the weights, "fp_" and 12 hex digits."""
        return self.info.fingerprint


def serve_model(
    client: EngineClient, codec: Codec, config: ServeConfig, metrics: Metrics, source: ModelSource | None
) -> ServedModel:
    """A version whose worker is not started yet."""
    info = client.info
    limits = Limits(
        context=info.max_seq_len,
        max_choices=config.max_completions,
        max_token_bytes=codec.max_token_bytes,
        max_body_bytes=config.max_body_bytes,
    )
    worker = EngineWorker(client, metrics, max_queue=config.max_queued, max_tokens=config.max_queued_tokens)
    grammars = GrammarCompiler(codec.definition, info.vocab_size, codec.stop_ids)
    return ServedModel(worker, codec, limits, grammars, source)


def engine_in_thread(model: Decoder, config: ServeConfig) -> EngineThread:
    """The model's engine in a thread of this process. Raises `ConfigError` if the cache is too small for it."""
    return EngineThread(Engine(model, config.engine), weights_fingerprint(model))


def load_engines(source: ModelSource, config: ServeConfig) -> tuple[EngineClient, Codec]:
    """The engines of a model, not started, and its tokenizer. Raises `ModelError` if the folder cannot be loaded."""
    model, codec = load_folder(source.folder, config.int8)
    return engine_in_thread(model, config), codec


def weights_fingerprint(model: Decoder) -> str:
    """A hash over names, formats and values of the tensors that a model computes with."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        plain = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {plain.dtype} {list(plain.shape)}".encode())
        hashed.update(plain.view(-1).view(torch.uint8).numpy().data)
    return f"fp_{hashed.hexdigest()[:FINGERPRINT_LEN]}"
