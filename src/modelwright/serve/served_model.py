"""One version of the model in service: its engine, tokenizer and limits."""

import hashlib
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelwright.infer.engine import Engine
from modelwright.model.decoder import Decoder
from modelwright.serve.config import ServeConfig
from modelwright.serve.grammars import GrammarCompiler
from modelwright.serve.limits import Limits
from modelwright.serve.load import ModelSource
from modelwright.serve.metrics import Metrics
from modelwright.serve.tokenizer import Codec
from modelwright.serve.worker import EngineWorker

FINGERPRINT_LEN = 12


@dataclass(frozen=True)
class ServedModel:
    """A model with a running worker. `fingerprint`: of its weights, "fp_" and 12 hex digits; `source`: where it comes
    from, None for one that exists in memory only.
    """

    worker: EngineWorker
    codec: Codec
    limits: Limits
    grammars: GrammarCompiler
    fingerprint: str
    source: ModelSource | None = None
    created: int = field(default_factory=lambda: int(time.time()))


def serve_model(
    model: Decoder, codec: Codec, config: ServeConfig, metrics: Metrics, source: ModelSource | None
) -> ServedModel:
    """A version whose worker is not started yet. Raises `ConfigError` if the cache is too small for the model."""
    engine = Engine(model, config.engine)
    limits = Limits(
        context=engine.max_seq_len,
        max_choices=config.max_completions,
        max_token_bytes=codec.max_token_bytes,
        max_body_bytes=config.max_body_bytes,
    )
    worker = EngineWorker(engine, metrics, max_queue=config.max_queued, max_tokens=config.max_queued_tokens)
    grammars = GrammarCompiler(codec.definition, engine.vocab_size, codec.stop_ids)
    return ServedModel(worker, codec, limits, grammars, weights_fingerprint(model), source)


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
