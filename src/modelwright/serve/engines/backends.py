"""Starts the engines of a model: ours in separate processes, or those of another program."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch

from modelwright.compress.gguf import GgufFormat
from modelwright.core.config import ConfigError
from modelwright.core.extensions import offered
from modelwright.infer.engine import Engine
from modelwright.infer.products import HEAD_KINDS
from modelwright.model.adapter_bank import load_adapters
from modelwright.model.decoder import Decoder
from modelwright.serve.config import OWN_BACKEND, ServeConfig
from modelwright.serve.engines.client import EngineClient, engine_info
from modelwright.serve.engines.openvino import openvino_engine
from modelwright.serve.engines.pool import launch_pool
from modelwright.serve.engines.process import EngineSetup
from modelwright.serve.engines.thread import EngineThread
from modelwright.serve.load import ModelSource, ServedTokenizer, weights_fingerprint

Loader = Callable[[ModelSource, ServeConfig], tuple[EngineClient, ServedTokenizer]]


@dataclass(frozen=True)
class Backend:
    """A back-end. load: starts the engines of a model; weights: formats that may follow the name, after a colon."""

    load: Loader
    weights: tuple[str, ...] = ()


def load_engines(source: ModelSource, config: ServeConfig) -> tuple[EngineClient, ServedTokenizer]:
    """Loads the engines of a model and its tokenizer. Raises `ModelError` if the folder cannot be loaded, `ConfigError`
    if the cache is too small for the model or the back-end does not support a setting.
    """
    return backend_of(config).load(source, config)


def backend_of(config: ServeConfig) -> Backend:
    """Returns the configured back-end. Raises `ConfigError` for an unknown name or format of weights, and for a
    back-end whose package is not installed or broken.
    """
    name, colon, weights = config.backend.partition(":")
    if name in BACKENDS:
        backend = BACKENDS[name]
    else:
        added = offered(BACKENDS_GROUP, Backend, taken=tuple(BACKENDS))
        if name in PACKAGED and name not in added:
            raise ConfigError(f"--backend: {name} is a separate package; pip install 'modelwright[{name}]'")
        if name not in added:
            raise ConfigError(f"--backend: {name!r} is unknown; choose from {', '.join([*BACKENDS, *added])}")
        backend = added[name]()
    formats = backend.weights
    if colon and weights not in formats:
        remedy = f"choose weights from {', '.join(formats)}" if formats else f"write {name}"
        raise ConfigError(f"--backend: {config.backend!r}: {remedy}")
    return backend


def _own_engines(source: ModelSource, config: ServeConfig) -> tuple[EngineClient, ServedTokenizer]:
    setup = EngineSetup(
        folder=str(source.folder),
        engine=asdict(config.engine),
        # engines share the cores: more threads than cores would slow down all of them
        num_threads=max(1, torch.get_num_threads() // config.engines),
        may_spare_thread=config.engines == 1,
        heads=HEAD_KINDS,
        int8_backend=config.int8.backend,
        adapters=config.adapters,
    )
    return launch_pool(setup, config.engines), ServedTokenizer.load(source.folder)


def engine_in_thread(model: Decoder, config: ServeConfig) -> EngineThread:
    """Creates the model's engine in a thread of this process. Raises `ConfigError` if the cache is too small for it,
    and `ModelError` for an adapter of another model.
    """
    adapters = load_adapters(model, {name: Path(folder) for name, folder in config.adapters.items()})
    engine = Engine(model, config.engine, adapters=adapters)
    return EngineThread(engine, engine_info(engine, weights_fingerprint(model)))


BACKENDS: Mapping[str, Backend] = {
    OWN_BACKEND: Backend(_own_engines),
    "openvino": Backend(openvino_engine, weights=get_args(GgufFormat)),
}
"""All back-ends of this package, by name."""
BACKENDS_GROUP = "modelwright.backends"
"""Group of the entry points of other packages, each a `Backend`."""
PACKAGED = ("vllm",)
"""Back-ends in other packages of this project. Each is installed by the extra of the same name."""
