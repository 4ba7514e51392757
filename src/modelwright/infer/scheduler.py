"""Continuous batching: plans the next step (Orca, Yu et al. 2022; chunked prefill, Agrawal et al.
2023).

First come, first served. Every step carries one token of each running sequence and some chunks of prompts. Prompts are
split at multiples of `prefill_chunk_size` of the prompt itself, never to fit a step, so that a prompt is computed in
the same chunks whatever else is running. When blocks run out, the newest running sequence is preempted and requeued;
later its prompt is computed again in the same chunks and its tokens are replayed one by one, bit for bit.

Neighbors in the queue with the same prompt (`n` answers, a group of rollouts) are started together: the first one
computes the prompt, the others follow it. They share its full blocks from the start, and fork when it is done: each
gets its own copy of the last block, which is not full, and its own row of logits.
"""

from collections import deque
from dataclasses import dataclass, field

from modelwright.infer.kv_cache import BlockManager, PrefixCache
from modelwright.infer.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a prompt. followers: sequences with the same prompt that fork when it is computed."""

    sequence: Sequence
    start: int
    end: int
    followers: tuple[Sequence, ...] = ()


@dataclass
class SchedulerOutput:
    """Work of one step: sequences that decode one token, and chunks of prompts."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class PromptLookup:
    """Guesses the next tokens of a sequence from its own earlier text (prompt lookup, Saxena 2023): what followed the
    last time that the sequence had its last few tokens. The engine computes the guesses together with the token before
    them and keeps those that it would have chosen anyway, so a wrong guess costs time and changes nothing. switch_len:
    length at which a sequence is computed anew, 0 for none (see `Engine.step`); no guess goes past it.
    """

    num_guesses: int
    switch_len: int = 0
    num_drafts: int = 0
    """Drafts verified since the start; the two counts below are of their tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def guess(self, sequence: Sequence) -> list[int]:
        """Guess the tokens after those of a decoding sequence; at least one fewer than it may still have, because a
        step that accepts all of them gives one more.
        """
        length = len(sequence.token_ids)
        count = min(self.num_guesses, sequence.params.max_tokens - sequence.num_new - 1)
        if length < self.switch_len:
            count = min(count, self.switch_len - length - 1)
        if count < 1 or sequence.is_replaying:
            return []
        sequence.ngrams.extend(sequence.token_ids)
        return sequence.ngrams.guess(sequence.token_ids, count)

    def accepts(self, sequence: Sequence, place: int) -> bool:
        """Returns true if the newest token of a running sequence is the one at `place` of its draft, so that the next
        token is chosen from the draft's row for it; counts the token as cached and accepted then.
        """
        if place >= len(sequence.draft) or sequence.token_ids[-1] != sequence.draft[place]:
            return False
        sequence.num_cached += 1
        self.num_accepted_tokens += 1
        return True


class Scheduler:
    """Holds waiting and running sequences. lookup: guesses tokens that decoding sequences verify."""

    def __init__(
        self,
        blocks: BlockManager,
        prefixes: PrefixCache,
        *,
        max_running: int,
        prefill_chunk: int,
        prefill_budget: int,
        lookup: PromptLookup,
    ) -> None:
        self.blocks = blocks
        self.prefixes = prefixes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._prefill_budget = prefill_budget
        self._lookup = lookup

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence and free its blocks."""
        if sequence in self.running:
            # Reversed, because each is put at the front of the queue, which keeps their order.
            for follower in reversed(self._followers(sequence)):
                self._requeue(follower)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocks.release(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Compute all tokens of a running sequence anew, as one prompt, before anything that waits."""
        sequence.num_prefill = len(sequence.token_ids)
        self._requeue(sequence)

    def plan(self) -> SchedulerOutput:
        """Choose the next step. The plan is empty when no sequence runs or waits."""
        # Decodes come first, then prompts in progress, then admissions: what has begun is finished before anything new
        # takes blocks. Every decoding sequence gets room for one more token, the oldest first.
        plan = SchedulerOutput()
        for sequence in list(self.running):
            if sequence.num_cached < sequence.num_prefill or sequence not in self.running:
                continue  # a follower counts as in prefill until it forks
            # The newest sequence is preempted first, so the oldest always progresses and no two evict each other.
            while not self.blocks.grow(sequence, sequence.num_cached + 1):
                newest = self.running[-1]
                self._requeue(newest)
                self.num_preemptions += 1
                if newest is sequence:
                    break
            else:
                plan.decodes.append(sequence)
        # Guesses come after all decodes have their blocks: they may take only blocks that nothing else needs.
        for sequence in plan.decodes:
            guesses = self._lookup.guess(sequence)
            has_room = self.blocks.grow(sequence, sequence.num_cached + 1 + len(guesses))
            sequence.draft = guesses if has_room else []
            self._lookup.num_drafts += bool(sequence.draft)
            self._lookup.num_draft_tokens += len(sequence.draft)
        budget = self._prefill_budget
        in_prefill = [one for one in self.running if one.num_cached < one.num_prefill and one.leader is None]
        for sequence in in_prefill:
            budget = self._take_chunk(sequence, plan, budget)
        while budget > 0 and self._admit_next():
            leader = self.running[-1]
            while self._admit_follower(leader):  # the queue's next ones, as long as they have the leader's prompt
                pass
            budget = self._take_chunk(leader, plan, budget)
        return plan

    def complete(self, plan: SchedulerOutput) -> None:
        """Note that a plan is computed: later prompts can find its chunks, and followers no longer have a leader."""
        for chunk in plan.chunks:
            self.prefixes.store(chunk.sequence, chunk.start)
            for follower in chunk.followers:
                follower.leader = None

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.leader, sequence.draft = None, []
        self.waiting.appendleft(sequence)

    def _admit_next(self) -> bool:
        """Start the first waiting sequence if there is a slot and room for all its tokens and one more."""
        if not self.waiting or len(self.running) >= self._max_running:
            return False
        sequence = self.waiting[0]
        found = self.prefixes.find(sequence)
        # One token more than there are, so that a sequence that starts can also decode without evicting another.
        if not self.blocks.share(sequence, found, len(sequence.token_ids) + 1):
            return False
        self.prefixes.count(sequence, len(found))
        sequence.num_cached = len(found) * self.blocks.block_len
        if not sequence.was_started:
            sequence.was_started, sequence.num_hit_tokens = True, sequence.num_cached
        self.running.append(self.waiting.popleft())
        return True

    def _admit_follower(self, leader: Sequence) -> bool:
        """Start the first waiting sequence if it has the prompt of `leader`, which is not computed yet, and there is a
        slot and room for it.
        """
        if not self.waiting or len(self.running) >= self._max_running:
            return False
        sequence = self.waiting[0]
        # A sequence whose own prompt's hidden states are needed cannot leave the prompt to another one.
        reads_prompt = sequence.wants_prompt_scores or sequence.pooling == "mean"
        if reads_prompt or not sequence.has_same_prompt(leader):
            return False
        full = leader.block_table[: leader.num_prefill // self.blocks.block_len]
        if not self.blocks.share(sequence, full, len(sequence.token_ids) + 1):
            return False
        sequence.leader, sequence.was_started = leader, True
        self.running.append(self.waiting.popleft())
        return True

    def _followers(self, leader: Sequence) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.leader is leader]

    def _take_chunk(self, sequence: Sequence, plan: SchedulerOutput, budget: int) -> int:
        """Plan the next chunk of a prompt if any budget is left; one a step, because a chunk needs its predecessors."""
        if budget <= 0:
            return budget
        start = sequence.num_cached
        end = min(sequence.num_prefill, start + self._prefill_chunk)
        # The last chunk forks the followers; budget may go below 0, because chunks are never cut to fit a step.
        followers = self._followers(sequence) if end == sequence.num_prefill else []
        plan.chunks.append(Chunk(sequence, start, end, tuple(followers)))
        return budget - (end - start)
