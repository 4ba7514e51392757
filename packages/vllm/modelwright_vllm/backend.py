"""Start of vLLM for a model: the back-end `vllm`; `vllm:float16` and others choose the number format.

The program's path, and its share of a GPU, belong to the machine and not to a run, so an environment variable sets
them: `MODELWRIGHT_VLLM="/opt/vllm/bin/vllm --gpu-memory-utilization=0.5"`.
"""

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from modelwright.compress.int8 import is_int8_folder
from modelwright.core.config import ConfigError, ModelError
from modelwright.model.hf import is_sequence_classifier, load_config
from modelwright.model.vision.llava import is_llava_folder
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import Backend
from modelwright.serve.engines.client import EngineClient, EngineInfo
from modelwright.serve.load import FINGERPRINT_LEN, ModelSource, ServedTokenizer, require_folder

DTYPES = ("bfloat16", "float16", "float32")
MOST_LOGPROBS = 20
"""Largest number of alternatives that a request may ask for (`NumLogprobs`)."""


def vllm_engine(source: ModelSource, config: ServeConfig) -> tuple[EngineClient, ServedTokenizer]:
    """Starts vLLM and waits until it is ready. Raises `ConfigError` if it does not support a setting or is not
    installed, `ModelError` for a model that it cannot load.
    """
    folder = source.folder
    _check(config, folder)
    program, options = vllm_command()
    from modelwright_vllm.client import VllmClient  # needs an HTTP client, which other back-ends do not
    from modelwright_vllm.process import VllmLaunch, VllmProcess
    from modelwright_vllm.wire import SERVED_NAME

    model, tokenizer = load_config(folder), ServedTokenizer.load(folder)
    dtype = config.backend.partition(":")[2] or "auto"
    caching = "enable-prefix-caching" if config.engine.enable_prefix_caching else "no-enable-prefix-caching"
    options = (
        *options,
        f"--served-model-name={SERVED_NAME}",
        f"--dtype={dtype}",
        f"--max-model-len={model.max_seq_len}",
        f"--max-num-seqs={config.engine.max_num_seqs}",
        f"--max-logprobs={MOST_LOGPROBS}",
        f"--{caching}",
        "--generation-config=vllm",  # the server decides on what a request leaves out
        '--structured-outputs-config={"backend": "guidance"}',  # llguidance, as in our engine
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    )
    launch = VllmLaunch(program=program, folder=folder.resolve(), options=options)
    fingerprint = partial(weights_of_files, folder, dtype)
    info = EngineInfo(
        fingerprint=fingerprint(),
        vocab_size=model.vocab_size,
        max_seq_len=model.max_seq_len,
        num_parameters=model.num_parameters,
        max_num_seqs=config.engine.max_num_seqs,
        model_dim=model.model_dim,
        scores=False,
        adapters={},
    )
    process = VllmProcess(launch)
    try:
        process.await_ready()
    except BaseException:
        process.end()
        raise
    return VllmClient(launch, process, info, fingerprint), tokenizer


def weights_of_files(folder: Path, dtype: str) -> str:
    """Computes the fingerprint of weights that this process does not load: a hash of their files and the format."""
    hashed = hashlib.sha256(dtype.encode())
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as content:
            hashed.update(path.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return f"fp_{hashed.hexdigest()[:FINGERPRINT_LEN]}"


def _check(config: ServeConfig, folder: Path) -> None:
    """Raises `ConfigError` for settings and `ModelError` for kinds of models that the back-end does not support."""
    if sys.platform != "linux":
        raise ConfigError("--backend: vllm runs on Linux alone; leave it out")
    refused = {
        "engines: the back-end vllm is one engine; give it several GPUs with --tensor-parallel-size=2, or several "
        f"copies of the model with --data-parallel-size=2, in {VARIABLE}": config.engines > 1,
        "--adapters: the back-end vllm serves none; merge an adapter into the model first": bool(config.adapters),
        "engine.num_speculative_tokens: is our engine's; give vLLM its own --speculative-config in "
        f"{VARIABLE}": config.engine.num_speculative_tokens > 0,
    }
    for text, is_asked in refused.items():
        if is_asked:
            raise ConfigError(text)
    require_folder(folder)
    if is_int8_folder(folder):
        raise ModelError(f"{folder}: vLLM reads no INT8 folder of this form; serve the model that it was made from")
    if is_sequence_classifier(folder):
        raise ModelError(f"{folder}: the back-end vllm generates texts and scores none")
    if is_llava_folder(folder):
        raise ModelError(f"{folder}: the back-end vllm gets token ids and no images; serve it without --backend")


VARIABLE = "MODELWRIGHT_VLLM"
USUAL = "vllm"
"""Default program, found on PATH."""
OF_THE_SERVER = (
    "--allowed-origins", "--api-key", "--config", "--dtype", "--enable-lora", "--enable-prefix-caching",
    "--generation-config", "--host", "--lora-modules", "--max-logprobs", "--max-model-len", "--max-num-seqs", "--model",
    "--no-enable-prefix-caching", "--port", "--served-model-name", "--ssl-certfile", "--structured-outputs-config",
    "--uds",
)  # fmt: skip
"""Options of vLLM that follow from the settings of the server. They come after the user's options, so that one in
another spelling (vLLM accepts abbreviations) has no effect."""


def vllm_command() -> tuple[str, Sequence[str]]:
    """Returns the program's path and the user's options of `vllm serve`. Raises `ConfigError` if the program does not
    exist, and for options that the server sets.
    """
    try:
        words = shlex.split(os.environ.get(VARIABLE, "")) or [USUAL]
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {error}; write such as /opt/vllm/bin/vllm") from None
    if words[1:] and not words[1].startswith("-"):
        raise ConfigError(f"{VARIABLE}: write the program and its options alone, without {words[1]!r}")
    for option in words[1:]:
        name = option.partition("=")[0].replace("_", "-")
        if name in OF_THE_SERVER:
            raise ConfigError(f"{VARIABLE}: {name} follows from the server's own settings; leave it out")
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(
            f"--backend: {words[0]!r} is not a program on PATH; pip install 'modelwright[vllm]', or, if vLLM's PyTorch "
            f"differs from this one, install it in a separate environment and name its program: {VARIABLE}="
            "/opt/vllm/bin/vllm"
        )
    return program, words[1:]


BACKEND = Backend(vllm_engine, weights=DTYPES)
