"""A step that does not fit into memory is made again in smaller microbatches: the same batch, hence the same gradient.

Knows what such an error looks like, into how many parts a batch is cut from then on, and how memory is given back.
Who else must know is the step's business.
"""

import gc
from typing import Any, Literal

import torch

from modelwright.core.errors import ModelwrightError
from modelwright.memory.allocator import give_back_freed_memory
from modelwright.optim.update import Context

WhenOutOfMemory = Literal["halve", "stop"]

_WORDS = ("can't allocate memory", "std::bad_alloc", "out of memory", "Cannot allocate memory")
"""Of PyTorch's allocator on the CPU, of C++, of accelerators, of the system."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on an accelerator or in the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


class Microbatches:
    """Into how many parts each rank cuts its rows: more of them once memory has run out. The checkpoint keeps it.

    asked: the number in the configuration. A run that goes on with another configured number takes that.
    As an `Update` it tells the metrics when the number is not the one asked for.
    """

    def __init__(self, asked: int) -> None:
        self.asked = asked
        self.num_parts = asked
        self._num_failed = 0

    def parts_of(self, num_rows: int) -> int:
        """For a batch of so many rows; a layout with fewer rows a rank may go back to the configured number."""
        return self.num_parts if num_rows % self.num_parts == 0 else self.asked

    def cut_smaller(self, num_rows: int) -> None:
        """At least twice as many parts. Raises `ModelwrightError` when a part is one row already."""
        present = self.parts_of(num_rows)
        possible = [parts for parts in range(2 * present, num_rows + 1) if num_rows % parts == 0]
        if not possible:
            raise ModelwrightError(
                "out of memory in a microbatch of one row; take shorter rows, keep less for backward (activations.mode "
                "unit), divide the model (parallel.shard) or train where there is more memory"
            )
        self.num_parts = possible[0]
        self._num_failed += 1

    def apply(self, context: Context) -> None:
        if self.num_parts != self.asked:
            context.scalars["num_microbatches"] = float(self.num_parts)
        if self._num_failed:
            context.scalars["out_of_memory"] = float(self._num_failed)
        self._num_failed = 0

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "num_parts": self.num_parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["asked"] == self.asked:
            self.num_parts = state["num_parts"]


def give_back_memory(device: torch.device) -> None:
    """Let go of what nobody needs: cycles of a failed step's graph, and freed memory that allocators keep."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    give_back_freed_memory()
