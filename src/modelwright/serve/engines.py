"""Starts the engines of a model: one in this process, or several in processes of their own."""

from dataclasses import asdict
from pathlib import Path

import torch

from modelwright.infer.engine import Engine
from modelwright.infer.lm_head import HEAD_KINDS
from modelwright.model.adapter_bank import load_adapters
from modelwright.model.decoder import Decoder
from modelwright.serve.config import ServeConfig
from modelwright.serve.engine_client import EngineClient
from modelwright.serve.engine_pool import launch_pool
from modelwright.serve.engine_process import EngineSetup
from modelwright.serve.engine_thread import EngineThread
from modelwright.serve.fingerprint import weights_fingerprint
from modelwright.serve.load import ModelSource, load_folder
from modelwright.serve.tokenizer import Codec


def load_engines(source: ModelSource, config: ServeConfig) -> tuple[EngineClient, Codec]:
    """The engines of a model and its tokenizer. Raises `ModelError` if the folder cannot be loaded, `ConfigError` if
    the cache is too small for the model.
    """
    if config.engines == 1:
        model, codec = load_folder(source.folder, config.int8)
        return engine_in_thread(model, config), codec
    setup = EngineSetup(
        folder=str(source.folder),
        engine=asdict(config.engine),
        num_threads=max(1, torch.get_num_threads() // config.engines),
        heads=HEAD_KINDS,
        int8_backend=config.int8.backend,
        adapters=config.adapters,
    )
    return launch_pool(setup, config.engines), Codec.load(source.folder)


def engine_in_thread(model: Decoder, config: ServeConfig) -> EngineThread:
    """The model's engine in a thread of this process. Raises `ConfigError` if the cache is too small for it, and
    `ModelError` for an adapter of another model.
    """
    adapters = load_adapters(model, {name: Path(folder) for name, folder in config.adapters.items()})
    return EngineThread(Engine(model, config.engine, adapters=adapters), weights_fingerprint(model))
