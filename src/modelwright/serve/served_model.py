"""One version of the model in service: its engines, tokenizer and limits."""

import time
from dataclasses import dataclass, field

from modelwright.serve.config import ServeConfig
from modelwright.serve.engine_client import EngineClient, EngineInfo
from modelwright.serve.grammars import GrammarCompiler
from modelwright.serve.limits import Limits
from modelwright.serve.load import ModelSource
from modelwright.serve.metrics import Metrics
from modelwright.serve.tokenizer import Codec
from modelwright.serve.worker import EngineWorker


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
