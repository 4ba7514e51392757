"""Continuous batching: which sequences take part in the next step (Orca, Yu et al. 2022; chunked prefill, Agrawal et
al. 2023).

First come, first served. Every step carries one token of each running sequence and some chunks of prompts. Prompts are
split at multiples of `prefill_chunk_size` of the prompt itself, never to fit a step, so that a prompt is computed in
the same chunks whatever else is running. When blocks run out, the newest running sequence is preempted and requeued;
later its prompt is computed again in the same chunks and its tokens are replayed one by one, bit for bit.
"""

from collections import deque
from dataclasses import dataclass, field

from modelwright.infer.kv_cache import BlockManager
from modelwright.infer.prefix_cache import PrefixCache
from modelwright.infer.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a prompt."""

    sequence: Sequence
    start: int
    end: int


@dataclass
class SchedulerOutput:
    """One step: sequences that get one token computed, and chunks of prompts."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


class Scheduler:
    """Holds waiting and running sequences."""

    def __init__(
        self,
        blocks: BlockManager,
        prefixes: PrefixCache,
        *,
        max_running: int,
        prefill_chunk: int,
        prefill_budget: int,
    ) -> None:
        self.blocks = blocks
        self.prefixes = prefixes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._prefill_budget = prefill_budget

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocks.release(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Compute all tokens of a running sequence anew, as one prompt, before anything that waits."""
        sequence.num_prefill = len(sequence.token_ids)
        self._requeue(sequence)

    def plan(self) -> SchedulerOutput:
        """Choose the next step. An empty plan means that there is no work."""
        plan = SchedulerOutput(decodes=self._reserve_decodes())
        budget = self._prefill_budget
        for sequence in [sequence for sequence in self.running if sequence.in_prefill]:
            budget = self._take_chunk(sequence, plan, budget)
        while budget > 0 and self._admit_next():
            budget = self._take_chunk(self.running[-1], plan, budget)
        return plan

    def store_prefixes(self, plan: SchedulerOutput) -> None:
        """Let later prompts find the chunks of a plan, once they are computed."""
        for chunk in plan.chunks:
            self.prefixes.store(chunk.sequence, chunk.start)

    def _reserve_decodes(self) -> list[Sequence]:
        """Allocate room for one more token of every decoding sequence, oldest first; the newest are preempted."""
        ready: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.in_prefill or sequence not in self.running:
                continue
            while not self.blocks.grow(sequence, sequence.num_cached + 1):
                newest = self.running[-1]
                self._preempt(newest)
                if newest is sequence:
                    break
            else:
                ready.append(sequence)
        return ready

    def _preempt(self, sequence: Sequence) -> None:
        self._requeue(sequence)
        self.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence)
        self.waiting.appendleft(sequence)

    def _admit_next(self) -> bool:
        """Start the first waiting sequence if there is a slot and room for all its tokens and one more."""
        if not self.waiting or len(self.running) >= self._max_running:
            return False
        sequence = self.waiting[0]
        found = self.prefixes.find(sequence)
        if not self.blocks.share(sequence, found, len(sequence.token_ids) + 1):
            return False
        self.prefixes.count(sequence, len(found))
        sequence.num_cached = len(found) * self.blocks.block_len
        if not sequence.was_started:
            sequence.was_started, sequence.num_hit_tokens = True, sequence.num_cached
        self.running.append(self.waiting.popleft())
        return True

    def _take_chunk(self, sequence: Sequence, plan: SchedulerOutput, budget: int) -> int:
        """Plan the next chunk of a prompt if any budget is left; one per step, because a chunk needs its
        predecessors.
        """
        if budget <= 0:
            return budget
        start = sequence.num_cached
        end = min(sequence.num_prefill, start + self._prefill_chunk)
        plan.chunks.append(Chunk(sequence, start, end))
        return budget - (end - start)
