"""A version of the model in service: its engines, tokenizer and limits."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.serve.account.metrics import Metrics
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.client import EngineClient, EngineInfo
from modelwright.serve.engines.grammars import GrammarCompiler
from modelwright.serve.engines.worker import EngineWorker
from modelwright.serve.errors import ApiError
from modelwright.serve.limits import Limits
from modelwright.serve.load import ModelSource, adapted_fingerprint
from modelwright.serve.tokenizer import ServedTokenizer


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter in service. `key`: its name in the engines, which no other adapter has ever had; `fingerprint`:
    version of the weights of model and adapter together.
    """

    folder: Path
    key: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class NamedWeights:
    """The weights that a name stands for: the engines' name of the adapter ("" for the model itself), and the version
    of the weights. A request looks them up once, so that loading and unloading adapters meanwhile does not affect it.
    """

    adapter: str
    version: str


@dataclass(frozen=True)
class ServedModel:
    """A model with a running worker. `source`: its origin, None for a model that exists in memory only; `adapters`:
    adapters by their names in requests; `aliases`: names by alias.
    """

    worker: EngineWorker
    tokenizer: ServedTokenizer
    limits: Limits
    grammars: GrammarCompiler
    source: ModelSource | None = None
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    unloaded: set[str] = field(default_factory=set)
    """Names of unloaded adapters. A request that was read before must get an error instead of the model itself."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def info(self) -> EngineInfo:
        return self.worker.client.info

    @property
    def image_text(self) -> str:
        """Text of an image's tokens in a prompt; "" for a text-only model."""
        info = self.info
        return self.tokenizer.token_text(info.image_token) * info.image_patches if info.reads_images else ""

    @property
    def fingerprint(self) -> str:
        """Version of the weights: "fp_" and 12 hex digits."""
        return self.info.fingerprint

    def adapter_of(self, name: str | None) -> ServedAdapter | None:
        """Returns the adapter of a name or alias, None for the model itself. Raises `ApiError` 404 if unloaded."""
        name = self.aliases.get(name or "", name or "")
        if name in self.unloaded:
            raise ApiError(404, f"The adapter {name!r} is no longer loaded.", param="model", code="model_not_found")
        return self.adapters.get(name)

    def weights_of(self, name: str) -> NamedWeights:
        """Returns the current weights of a name. Raises like `adapter_of`."""
        adapter = self.adapter_of(name)
        return NamedWeights(adapter.key, adapter.fingerprint) if adapter else NamedWeights("", self.fingerprint)


def serve_model(
    client: EngineClient, tokenizer: ServedTokenizer, config: ServeConfig, metrics: Metrics, source: ModelSource | None
) -> ServedModel:
    """Returns a version whose worker has not been started."""
    info, images = client.info, config.images
    limits = Limits(
        context=info.max_seq_len,
        max_choices=config.max_completions,
        max_token_bytes=tokenizer.max_token_bytes,
        max_body_bytes=config.max_body_bytes,
        # base64 has four characters for each three bytes
        image_bytes=images.max_count * (images.max_bytes // 3 + 1) * 4 if info.reads_images else 0,
    )
    worker = EngineWorker(client, metrics, max_queue=config.max_queued, max_tokens=config.max_queued_tokens)
    grammars = GrammarCompiler(tokenizer.definition, info.vocab_size, tokenizer.stop_ids)
    adapters = {
        name: ServedAdapter(Path(config.adapters[name]), name, adapted_fingerprint(info.fingerprint, digest))
        for name, digest in info.adapters.items()
    }
    return ServedModel(worker, tokenizer, limits, grammars, source, adapters, config.aliases)
