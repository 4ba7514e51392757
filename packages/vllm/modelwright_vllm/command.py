"""Which vLLM is started. Where it is, and how much of a GPU it may take, belongs to the machine and not to a run, so an
environment variable says it: `MODELWRIGHT_VLLM="/opt/vllm/bin/vllm --gpu-memory-utilization=0.5"`.
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from modelwright.core.errors import ConfigError

VARIABLE = "MODELWRIGHT_VLLM"
USUAL = "vllm"
"""Found on PATH."""

OF_THE_SERVER = (
    "--allowed-origins", "--api-key", "--config", "--dtype", "--enable-lora", "--enable-prefix-caching",
    "--generation-config", "--host", "--lora-modules", "--max-logprobs", "--max-model-len", "--max-num-seqs", "--model",
    "--no-enable-prefix-caching", "--port", "--served-model-name", "--ssl-certfile", "--structured-outputs-config",
    "--uds",
)  # fmt: skip
"""Options of vLLM that follow from the settings of the server. They are given after the user's, so that one that is
written in another way (vLLM takes abbreviations) changes nothing."""


@dataclass(frozen=True)
class VllmCommand:
    """program: its path; options: of `vllm serve`, beside those that the server gives."""

    program: str
    options: Sequence[str]


def vllm_command() -> VllmCommand:
    """Raises `ConfigError` where there is no such program, and for options that are not the user's to choose."""
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
            f"--backend: {words[0]!r} is no program on PATH; pip install 'modelwright[vllm]', or, where vLLM's PyTorch "
            f"differs from this one's, install it in an environment of its own and name its program: {VARIABLE}="
            "/opt/vllm/bin/vllm"
        )
    return VllmCommand(program, words[1:])
