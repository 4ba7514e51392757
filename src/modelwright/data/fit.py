"""Truncates conversations to the length of a row and counts those that do not fit.

A conversation is truncated at its end, as in TRL and torchtune. The tokens that remain are still correct targets, and
no end token follows them, so a truncated answer does not teach the model to stop early.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

WHOLE_SHARE = 0.99
"""Share of the conversations that fit into a row of the suggested length."""


@dataclass(kw_only=True)
class ConversationFit:
    """Truncates conversations to `seq_len` tokens.

    `overlong`: "split" truncates a longer conversation, "skip" drops it. `num_dropped` includes conversations whose
    truncation would leave no token of an answer. `lengths`: number of conversations by length in tokens.
    `num_empty_answers`: turns of the assistant that say nothing, which are context and not learned.
    """

    seq_len: int
    overlong: Literal["split", "skip"]
    num_conversations: int = 0
    num_truncated: int = 0
    num_dropped: int = 0
    num_empty_answers: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def fit(
        self, ids: np.ndarray, mask: np.ndarray, *, stop_ids: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the token ids [T] and the loss mask [T] to pack, or None if the conversation is dropped.

        Tokens after the last answer are removed. If the chat template puts no end token after an answer,
        `stop_ids[0]` is appended to the last one.
        """
        self.num_conversations += 1
        answered = np.flatnonzero(mask)
        end = int(answered[-1]) + 1 if len(answered) else 0
        ids, mask = ids[:end], mask[:end]
        if end and int(ids[-1]) not in stop_ids:
            ids, mask = np.append(ids, stop_ids[0]), np.append(mask, np.uint8(1))
        self.lengths[len(ids)] += 1
        if end and len(ids) <= self.seq_len:
            return ids, mask
        if self.overlong == "skip" or not mask[1 : self.seq_len].any():
            self.num_dropped += 1
            return None
        self.num_truncated += 1
        return ids[: self.seq_len], mask[: self.seq_len]

    @property
    def num_overlong(self) -> int:
        return self.num_truncated + self.num_dropped

    def row_len(self, share: float = WHOLE_SHARE) -> int:
        """The shortest row length, in tokens, that at least `share` of the conversations fit into."""
        num_whole = 0
        for length, times in sorted(self.lengths.items()):
            num_whole += times
            if num_whole >= share * self.num_conversations:
                return length
        return 0

    def facts(self) -> dict[str, Any]:
        """The counts as plain data for the artifact's manifest."""
        return {
            "seq_len": self.seq_len,
            "num_conversations": self.num_conversations,
            "num_truncated": self.num_truncated,
            "num_dropped": self.num_dropped,
            "num_empty_answers": self.num_empty_answers,
            "row_len_for_99_percent": self.row_len(),
        }
