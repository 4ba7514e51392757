"""OpenVINO GenAI as the engine, on CPUs: `modelwright serve RUN --backend openvino`; `openvino:q8_0` for 8-bit weights.

The model is written as a GGUF file, which OpenVINO reads without a conversion; its continuous batching computes the
answers. Activations and cache are FP32, as in our own engine. Needs the extra `openvino`. `MODELWRIGHT_ISA` does not
limit OpenVINO, which uses all instructions of the processor.
"""

import hashlib
import itertools
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from modelwright.compress.gguf import GgufFormat, export_gguf
from modelwright.compress.int8 import is_int8_folder
from modelwright.core.config import ConfigError, ModelError
from modelwright.infer.engine import EngineConfig, EngineStats, StepOutput
from modelwright.infer.sequence import Pixels, Pooling, SamplingParams, TokenConstraint
from modelwright.model.hf import is_sequence_classifier, load_config
from modelwright.serve.account.monitoring import NO_LOAD
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.client import ABILITIES, EngineClient, EngineInfo, refuse_lacking
from modelwright.serve.engines.thread import EngineThread
from modelwright.serve.load import FINGERPRINT_LEN, ModelSource, ServedTokenizer

if TYPE_CHECKING:
    from openvino_genai import ContinuousBatchingPipeline
    from openvino_genai.py_openvino_genai import GenerationHandle

BLOCK_LEN = 32
"""Tokens per block of OpenVINO's cache on CPUs."""
MOST_SEED = 2**63
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Overrides OpenVINO's defaults: BF16 where the processor supports it, and an 8-bit cache."""
FILE_NAME = "served"
"""Name of the model inside the GGUF file. It is constant, so that equal weights have equal fingerprints."""

REASONS = {"STOP": "stop", "LENGTH": "length"}


def openvino_engine(source: ModelSource, config: ServeConfig) -> tuple[EngineClient, ServedTokenizer]:
    """Loads a model into OpenVINO. Raises `ConfigError` for settings that OpenVINO does not support and without the
    extra, `ModelError` for a model that it cannot read.
    """
    refused = {
        "engines: the back-end openvino is one engine, which uses all threads": config.engines > 1,
        "--adapters: the back-end openvino serves none; merge an adapter into the model first": bool(config.adapters),
        "engine.num_speculative_tokens: the back-end openvino guesses none": config.engine.num_speculative_tokens > 0,
    }
    for text, is_asked in refused.items():
        if is_asked:
            raise ConfigError(text)
    folder = source.folder
    if is_int8_folder(folder):
        raise ModelError(f"{folder}: OpenVINO reads no INT8 folder; serve the model before it with openvino:q8_0")
    if is_sequence_classifier(folder):
        raise ModelError(f"{folder}: the back-end openvino generates texts and scores none")
    model, tokenizer = load_config(folder), ServedTokenizer.load(folder)
    if config.engine.kv_cache_tokens // BLOCK_LEN * BLOCK_LEN < model.max_seq_len:
        text = f"{config.engine.kv_cache_tokens} cannot hold a sequence of {model.max_seq_len} tokens, the context"
        raise ConfigError(f"kv_cache_tokens: {text}, in blocks of {BLOCK_LEN}; raise it")
    weights: Any = config.backend.partition(":")[2] or "f16"
    pipeline, fingerprint = _load(folder, weights, config.engine)
    info = EngineInfo(
        fingerprint=fingerprint,
        vocab_size=model.vocab_size,
        max_seq_len=model.max_seq_len,
        num_parameters=model.num_parameters,
        max_num_seqs=config.engine.max_num_seqs,
        model_dim=model.model_dim,
        scores=False,
        adapters={},
    )
    engine = OpenVinoEngine(pipeline, config.engine, info)
    return EngineThread(engine, info, check=partial(refuse_lacking, "openvino", ABILITIES)), tokenizer


class OpenVinoEngine:
    """A `StepEngine` over OpenVINO's continuous batching."""

    def __init__(self, pipeline: "ContinuousBatchingPipeline", config: EngineConfig, info: EngineInfo) -> None:
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        self._pipeline = pipeline
        self._info = info
        self._num_blocks = config.kv_cache_tokens // BLOCK_LEN
        self._numbers = itertools.count()
        self._handles: dict[str, GenerationHandle] = {}
        self._tensor, self._new_config = Tensor, GenerationConfig

    @property
    def has_work(self) -> bool:
        return bool(self._handles) or self._pipeline.has_non_finished_requests()

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        constraint: TokenConstraint | None = None,
        *,
        cache_salt: str = "",
        adapter: str = "",
        images: Sequence[Pixels] = (),
    ) -> None:
        assert constraint is None
        assert not adapter
        assert not images
        room = self._info.max_seq_len - len(prompt_ids)
        if room < 1:
            raise ConfigError(f"prompt: leaves no room in a context of {self._info.max_seq_len} tokens")
        config = self._new_config()
        config.max_new_tokens = min(params.max_tokens, room)
        config.min_new_tokens = min(params.min_tokens, room)
        config.logprobs = 1
        config.presence_penalty = params.presence_penalty
        config.frequency_penalty = params.frequency_penalty
        config.repetition_penalty = params.repetition_penalty
        config.ignore_eos = not params.stop_ids
        if params.stop_ids:  # the model's own end token counts only if it is among them
            config.eos_token_id = params.stop_ids[0]
            config.stop_token_ids = set(params.stop_ids)
        config.do_sample = params.temperature > 0
        if config.do_sample:
            config.temperature = params.temperature
            config.top_p = params.top_p
            config.min_p = params.min_p
            config.rng_seed = params.seed % MOST_SEED
            if params.top_k:
                config.top_k = params.top_k
        ids = self._tensor(np.array([list(prompt_ids)], dtype=np.int64))
        try:
            self._handles[request_id] = self._pipeline.add_request(next(self._numbers), ids, config)
        except RuntimeError as error:
            raise ConfigError(f"OpenVINO refuses the request: {str(error).splitlines()[-1]}") from None

    def embed(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        pooling: Pooling = "last",
        cache_salt: str = "",
        adapter: str = "",
    ) -> None:
        raise ConfigError("model: the back-end openvino does not support embeddings")

    def abort(self, request_id: str) -> bool:
        handle = self._handles.pop(request_id, None)
        if handle is not None:
            handle.cancel()
        return handle is not None

    def step(self) -> list[StepOutput]:
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        outputs: list[StepOutput] = []
        for request_id, handle in self._handles.items():
            # OpenVINO drops an answer that does not fit in its cache, and reports nothing else
            if not handle.can_read():
                if handle.get_status().name != "RUNNING":
                    outputs.append(StepOutput(request_id, 0, 0.0, (), "error"))
                continue
            for part in handle.read().values():
                reason = REASONS.get(part.finish_reason.name, "")
                last = len(part.generated_ids) - 1
                for at, (token, logprob) in enumerate(zip(part.generated_ids, part.generated_log_probs, strict=True)):
                    outputs.append(StepOutput(request_id, token, logprob, (), reason if at == last else ""))
        # only now, because the loop above iterates over the handles
        for output in outputs:
            if output.finished:
                del self._handles[output.request_id]
        return outputs

    def stats(self) -> EngineStats:
        metrics = self._pipeline.get_metrics()
        num_running = min(len(self._handles), metrics.scheduled_requests)
        num_used = round(metrics.cache_usage / 100 * self._num_blocks) if self._handles else 0
        return replace(
            NO_LOAD,
            num_running=num_running,
            num_waiting=len(self._handles) - num_running,
            num_blocks=self._num_blocks,
            num_free_blocks=self._num_blocks - num_used,
        )


def _load(folder: Path, weights: GgufFormat, config: EngineConfig) -> tuple[Any, str]:
    # Under a limit to an older instruction set (`MODELWRIGHT_ISA`), OpenVINO 2026.4 chooses the layouts of weights for
    # the processor and the products within the limit, and then finds no product for them. It reads the variable when it
    # is loaded; PyTorch computes nothing in this process.
    os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
    try:
        import openvino_genai as genai
    except ImportError as error:
        text = f"the back-end openvino needs a package that is not installed ({error.name})"
        raise ConfigError(f"--backend: {text}; pip install 'modelwright[openvino]'") from None
    scheduling = genai.SchedulerConfig()
    scheduling.num_kv_blocks = config.kv_cache_tokens // BLOCK_LEN
    scheduling.max_num_seqs = config.max_num_seqs
    scheduling.max_num_batched_tokens = config.max_num_batched_tokens
    scheduling.enable_prefix_caching = False  # the cache would be shared between API keys
    properties = EXACT | {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as place:
        file = export_gguf(folder, Path(place) / "model.gguf", number_format=weights, name=FILE_NAME)
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        # In a thread that ends: OpenVINO's plugin for CPUs gives the thread that loads it an alternate signal stack,
        # and unmaps that stack when another thread frees the plugin, or when plugins are not freed in reverse order. In
        # the main thread the next signal would then end the process instead of draining it.
        try:
            with ThreadPoolExecutor(1, "openvino") as thread:
                pipeline = thread.submit(genai.ContinuousBatchingPipeline, file, scheduling, "CPU", properties).result()
        except RuntimeError as error:
            raise ModelError(f"{folder}: OpenVINO cannot read it: {str(error).strip().splitlines()[-1]}") from None
    return pipeline, f"fp_{digest[:FINGERPRINT_LEN]}"
