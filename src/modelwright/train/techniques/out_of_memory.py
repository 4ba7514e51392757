"""A step that does not fit into memory is repeated in smaller microbatches: same batch, hence same gradient."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from modelwright.core.config import ModelwrightError
from modelwright.data.rows.batch import part_sizes
from modelwright.ops.tensor_heap import give_back_memory
from modelwright.parallel.mesh import World
from modelwright.train.objective import Batch, LossFn, Runner
from modelwright.train.technique import Runtime, Technique, Update

WhenOutOfMemory = Literal["halve_microbatch", "fail"]

_WORDS = ("can't allocate memory", "std::bad_alloc", "out of memory", "Cannot allocate memory")
"""Out-of-memory messages of PyTorch's CPU allocator, C++, accelerators and the operating system."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, on an accelerator or in the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@dataclass(kw_only=True)
class RetryOutOfMemory:
    """A `Runner` whose step is repeated in microbatches of half as many row groups if memory ran out on any rank.

    Once memory has run out, all ranks keep to microbatches of at most that many groups; the checkpoint stores the
    limit, because batches may differ in size. A run that is resumed with another configured number starts over.
    """

    runner: Runner
    world: World
    """The ranks that make an update together."""
    blocker: Callable[[], str] = lambda: ""
    """Returns the reason why a step cannot be repeated, or ""."""
    can_cut: bool = True
    """True if the layout lets a rank choose the number of microbatches; pipeline stages expect the configured one."""
    max_groups: int = 0
    """Most groups of rows in one microbatch; 0 means no limit."""
    group_size: int = 1
    """Rows of a group of the newest batch."""
    num_parts: int = 0
    """Microbatches of the newest attempt."""
    num_failed: int = 0
    """Attempts at the newest batch that ran out of memory."""
    fitting_groups: float = math.inf
    """Groups in a microbatch that may fit on this rank, from the newest attempt; infinite if that one fitted."""

    @property
    def microbatches(self) -> int:
        return self.runner.microbatches

    def num_microbatches(self, num_groups: int) -> int:
        is_limited = self.can_cut and self.max_groups > 0
        asked = self.runner.microbatches
        return max(asked, math.ceil(num_groups / self.max_groups)) if is_limited else asked

    def train(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        begin: Callable[[], None],
        before_last_backward: Callable[[], None],
        num_parts: int = 0,
    ) -> bool:
        """See `Runner`. Raises `ModelwrightError` if memory runs out and the step cannot be repeated."""
        self.group_size, self.fitting_groups = batch.group_size, math.inf
        num_parts = self.num_parts = num_parts or self.num_microbatches(batch.num_groups)
        try:
            self.runner.train(
                batch, loss_fn, begin=begin, before_last_backward=before_last_backward, num_parts=num_parts
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if why := self.blocker():
                text = f"out of memory: {str(error).strip()}\nout-of-memory retry is disabled: {why}"
                raise ModelwrightError(text) from error
            # Half of the largest microbatch that was tried; 0 if a single group did not fit.
            self.fitting_groups = max(part_sizes(max(batch.num_groups, num_parts), num_parts)) // 2
        return math.isinf(self.fitting_groups)

    def shrink_microbatches(self) -> None:
        """See `Runner`. Raises `ModelwrightError` on all ranks if a single row, or group, did not fit on one."""
        fitting_groups = -self.world.maxima(-self.fitting_groups)[0]  # the minimum over the ranks
        if fitting_groups < 1:
            smallest = "one row" if self.group_size == 1 else f"one group of {self.group_size} rows"
            raise ModelwrightError(
                f"out of memory in a microbatch of {smallest}; use shorter rows, save less for backward "
                "(activation_checkpointing.mode full), shard the model (parallel.zero_stage), or add memory"
            )
        self.max_groups = int(fitting_groups)
        self.num_failed += 1

    def on_gradients(self, update: Update) -> None:
        if self.num_parts != self.runner.microbatches:
            update.metrics["num_microbatches"] = float(self.num_parts)
        if self.num_failed:
            update.metrics["out_of_memory"] = float(self.num_failed)
            update.metrics["microbatch_rows"] = float(self.max_groups * self.group_size)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.runner.microbatches, "max_groups": self.max_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["asked"] == self.runner.microbatches:
            self.max_groups = state["max_groups"]


def out_of_memory(mode: WhenOutOfMemory, run: Runtime) -> Technique | None:
    """Makes the run repeat steps that do not fit into memory; the checkpoint stores the limit that it finds."""
    if mode == "fail":
        return None
    retry = RetryOutOfMemory(
        runner=run.runner,
        world=run.mesh.world,
        blocker=lambda: run.strategy.retry_blocker,
        can_cut=run.mesh.is_only_data_parallel,
    )
    run.runner = retry

    def on_batch(step: int, batch: Batch) -> Batch:
        if why := retry.blocker():
            run.note(f"out-of-memory retry is disabled: {why}")
        retry.num_failed = 0
        return batch

    return Technique(
        name="out_of_memory",
        on_batch=on_batch,
        on_gradients=retry.on_gradients,
        on_retry=give_back_memory,  # the reference cycles of the failed step's graph, and what allocators cache
        state=retry,
        needs=frozenset(),
    )
