"""What a person chooses about activations: what forward keeps for backward, where, and what is computed again."""

from dataclasses import dataclass
from typing import Literal, get_args

from modelwright.core.errors import ConfigError

Mode = Literal["none", "unit", "selective", "budget"]
Tier = Literal["none", "host", "disk"]
"""Where what is kept may wait besides the device's own memory."""
Operator = Literal["q_proj", "k_proj", "v_proj", "attend", "o_proj", "gate_proj", "up_proj"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
"""The expensive operators of a block in the order in which they run; their outputs may be kept.

`down_proj` is the last one: nothing in the block's backward pass needs its output, so it is never computed again.
"""


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """What blocks keep from forward to backward.

    mode: none keeps all that backward needs; unit keeps the input of every `unit_layers` consecutive blocks and
    computes the rest of such a unit again as one; selective keeps each block's input and the outputs of the operators
    in `keep` and computes the others again, norms, rotations and gating always; budget chooses for every block so that
    the activations of one rank fit into `budget_bytes` with the least computed again and moved.
    offload: what is kept waits in the host's memory (for models on an accelerator) or in a file in `offload_folder`
    ("": the run's own); all of it, but in mode budget only where that costs less than computing it again.
    flops_per_byte: FLOPs that could be computed while one byte moves to that place or back, which mode budget needs;
    `modelwright plan --memory` measures it. Beside the budget a disk takes what is still to be written (at most
    `disk.MOST_QUEUED_BYTES`) and what is read ahead.
    """

    mode: Mode = "none"
    unit_layers: int = 8
    keep: tuple[Operator, ...] = OPERATORS
    budget_bytes: int = 0
    offload: Tier = "none"
    offload_folder: str = ""
    flops_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.unit_layers < 1:
            raise ConfigError(f"unit_layers: must be at least 1, got {self.unit_layers}")
        if len(set(self.keep)) != len(self.keep):
            raise ConfigError(f"keep: an operator is named twice: {', '.join(self.keep)}")
        if self.mode == "selective" and not self.keep:
            raise ConfigError("keep: is empty; mode unit with unit_layers 1 keeps nothing but each block's input")
        if self.budget_bytes < 0 or (self.budget_bytes > 0) != (self.mode == "budget"):
            raise ConfigError(
                f"budget_bytes: must be above 0 with mode budget else 0, got {self.budget_bytes} with {self.mode}"
            )
        if self.flops_per_byte < 0 or (self.flops_per_byte == 0) == (self.mode == "budget" and self.offload != "none"):
            raise ConfigError(
                f"flops_per_byte: must be above 0 with mode budget and offload, else 0, got {self.flops_per_byte}; "
                "`modelwright plan --memory --offload` measures it"
            )
        if self.offload_folder and self.offload != "disk":
            raise ConfigError(f"offload_folder: goes with offload disk, not {self.offload}; leave it out")
