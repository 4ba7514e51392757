"""Settings of activations: saving, recomputation and offloading between forward and backward."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from modelwright.core.config import only_for
from modelwright.core.errors import ConfigError

Mode = Literal["none", "full", "selective", "budget"]
Tier = Literal["none", "host", "disk"]
"""Target of offloading: where saved activations are kept instead of the device's memory."""
Operator = Literal["q_proj", "k_proj", "v_proj", "attend", "o_proj", "gate_proj", "up_proj"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
"""The expensive operators of a block in the order in which they run; their outputs may be kept.

`down_proj` is the last one: nothing in the block's backward pass needs its output, so it is never computed again.
"""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Settings of saving, recomputing and offloading activations."""

    mode: Mode = "none"
    """`none` saves everything; `full` saves the input of every `layers_per_segment` blocks and recomputes the rest;
    `selective` saves each block's input and the outputs in `save_outputs_of`; `budget` chooses for every block so that
    one rank's activations fit `budget_bytes` at the least extra cost."""
    layers_per_segment: int = field(default=8, metadata=only_for("mode", "full"))
    """`full`: consecutive blocks that are recomputed together."""
    save_outputs_of: tuple[Operator, ...] = field(default=OPERATORS, metadata=only_for("mode", "selective"))
    """`selective`: operators whose outputs are saved. Norms, rotary embeddings and gating are always recomputed."""
    budget_bytes: int = 0
    """`budget`: bytes of activations on one rank; a number, or 180MiB."""
    offload: Tier = "none"
    """Move saved activations to host memory (models on an accelerator) or to disk: all of them, or in mode `budget`
    those for which it is cheaper than recomputing."""
    offload_dir: str = ""
    """Folder for `offload: disk`; "" is the run's own."""
    flops_per_byte: float = 0.0
    """FLOPs that could be computed while one byte moves to or from the offload target; needed by mode `budget` with
    offload, measured by `modelwright plan memory --offload`."""

    def __post_init__(self) -> None:
        if self.layers_per_segment < 1:
            raise ConfigError(f"layers_per_segment: must be at least 1, got {self.layers_per_segment}")
        if len(set(self.save_outputs_of)) != len(self.save_outputs_of):
            raise ConfigError(f"save_outputs_of: an operator is named twice: {', '.join(self.save_outputs_of)}")
        if self.mode == "selective" and not self.save_outputs_of:
            raise ConfigError(
                "save_outputs_of: is empty; mode full with layers_per_segment 1 saves only each block's input"
            )
        if self.budget_bytes < 0 or (self.budget_bytes > 0) != (self.mode == "budget"):
            raise ConfigError(
                f"budget_bytes: must be above 0 with mode budget else 0, got {self.budget_bytes} with {self.mode}"
            )
        if self.flops_per_byte < 0 or (self.flops_per_byte == 0) == (self.mode == "budget" and self.offload != "none"):
            raise ConfigError(
                f"flops_per_byte: must be above 0 with mode budget and offload, else 0, got {self.flops_per_byte}; "
                "`modelwright plan memory TARGET --offload disk` measures it"
            )
        if self.offload_dir and self.offload != "disk":
            raise ConfigError(f"offload_dir: applies to offload disk, not {self.offload}; leave it out")
