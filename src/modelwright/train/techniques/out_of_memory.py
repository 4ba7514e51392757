"""A step that does not fit into memory is made again in smaller microbatches: the same batch, hence the same gradient.

Knows what such an error looks like, how many rows a part of a batch has from then on, and how memory is given back.
"""

import gc
import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from modelwright.core.errors import ModelwrightError
from modelwright.data.batch import part_sizes
from modelwright.memory.allocator import give_back_freed_memory
from modelwright.optim.update import Context
from modelwright.parallel.mesh import Mesh

WhenOutOfMemory = Literal["halve", "stop"]

_WORDS = ("can't allocate memory", "std::bad_alloc", "out of memory", "Cannot allocate memory")
"""Of PyTorch's allocator on the CPU, of C++, of accelerators, of the system."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on an accelerator or in the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def in_the_way(mesh: Mesh, *, sends_in_backward: bool, updates_in_backward: bool) -> str:
    """What keeps a rank from leaving forward and backward without a word, "" when nothing does: nothing may pass
    between ranks within them."""
    if mesh.world.size == 1:
        return ""
    if not mesh.is_only_data_parallel:
        sizes = {name: getattr(mesh, name).size for name in ("pipeline", "shard", "context", "tensor")}
        layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return f"the layout (parallel: {layout}), in which ranks wait for one another amid forward and backward"
    if updates_in_backward:
        return "update_in_backward, for which ranks agree amid backward; set it to none"
    if sends_in_backward:
        return "transport.overlap, which sends gradients amid backward; set it to false"
    return ""


def not_halving(why: str) -> str:
    return f"guards.out_of_memory: a step that does not fit into memory is not made again in smaller parts: {why}"


class Microbatches:
    """Into how many parts each rank cuts its rows: once memory has run out, parts of at most so many rows as are taken
    to fit, the same number on all ranks. The checkpoint keeps it, for batches need not have equally many rows.

    asked: the number of parts in the configuration; a run that goes on with another takes that. agree: the largest of
    a value over all ranks. cuts: whether the layout lets a rank cut as it likes (stages of a pipeline expect the parts
    that are configured). As an `Update` it tells the metrics when memory has run out.
    """

    def __init__(self, asked: int, *, agree: Callable[[float], float] = float, cuts: bool = True) -> None:
        self.asked = asked
        self.agree = agree
        self.cuts = cuts
        self.max_rows = 0
        """Of a part; 0: as many as come."""
        self.num_parts = asked
        """Of the newest batch."""
        self._fits = math.inf
        self._num_failed = 0

    def parts_of(self, num_rows: int) -> int:
        """For a batch of so many rows."""
        is_limited = self.cuts and self.max_rows > 0
        self.num_parts = max(self.asked, math.ceil(num_rows / self.max_rows)) if is_limited else self.asked
        return self.num_parts

    def failed(self, num_rows: int, error: BaseException, why_not: str) -> None:
        """On this rank the newest batch, of so many rows, did not fit: half of its largest part may.

        Raises `ModelwrightError` when the step cannot be made again, with the reason.
        """
        if why_not:
            raise ModelwrightError(f"out of memory: {str(error).strip()}\n{not_halving(why_not)}") from error
        self._fits = max(part_sizes(num_rows, self.num_parts)) // 2

    def cut_smaller(self) -> None:
        """On all ranks together, after a step that did not fit on some. Raises `ModelwrightError` on all of them when
        it was one row that did not fit."""
        max_rows, self._fits = -self.agree(-self._fits), math.inf
        if max_rows < 1:
            raise ModelwrightError(
                "out of memory in a microbatch of one row; take shorter rows, keep less for backward (activations.mode "
                "unit), divide the model (parallel.shard) or train where there is more memory"
            )
        self.max_rows = int(max_rows)
        self._num_failed += 1

    def apply(self, context: Context) -> None:
        if self.num_parts != self.asked:
            context.scalars["num_microbatches"] = float(self.num_parts)
        if self._num_failed:
            context.scalars["out_of_memory"] = float(self._num_failed)
            context.scalars["microbatch_rows"] = float(self.max_rows)
        self._num_failed = 0

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked, "max_rows": self.max_rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["asked"] == self.asked:
            self.max_rows = state.get("max_rows", 0)


def give_back_memory(device: torch.device) -> None:
    """Let go of what nobody needs: cycles of a failed step's graph, and freed memory that allocators keep."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    give_back_freed_memory()
