"""Settings of the back-end vllm."""

from dataclasses import dataclass, field

from modelwright.core.config import constant, word_for_none
from modelwright.core.errors import ConfigError

OF_THE_SERVER = (
    "allowed-origins", "api-key", "config", "dtype", "enable-lora", "generation-config", "host", "lora-modules",
    "max-logprobs", "max-model-len", "max-num-seqs", "port", "served-model-name", "ssl-certfile", "uds",
)  # fmt: skip
"""Options of vLLM that follow from the settings of the server."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """How `--backend vllm` starts vLLM."""

    command: str = "vllm"
    """The program: a name on PATH, or the path of one, such as that of another Python environment."""
    options: tuple[str, ...] = field(default=(), metadata=word_for_none())
    """Further options of `vllm serve`, without their hyphens, such as `gpu-memory-utilization=0.5` and
    `tensor-parallel-size=2`."""
    start_timeout_s: float = constant(1800.0)
    """Seconds in which vLLM must have loaded the model, compiled it and captured its graphs."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("vllm.command: is empty; name the program, such as vllm")
        for option in self.options:
            name = option.partition("=")[0].replace("_", "-")
            if not name or name.startswith("-") or name in OF_THE_SERVER:
                reason = (
                    "follows from the server's own settings" if name in OF_THE_SERVER else "is no name of an option"
                )
                raise ConfigError(
                    f"vllm.options: {option!r}: {name!r} {reason}; write others as tensor-parallel-size=2"
                )
