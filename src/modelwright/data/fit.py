"""Conversations made to fit into rows of tokens, and what did not fit, counted.

An answer that does not fit is cut off at the end of the row, as TRL and torchtune do: the tokens that are left are
still what the answer says, and no end token follows them, so nothing wrong is learned.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

WHOLE_SHARE = 0.99
"""Share of the conversations that a suggested row length keeps whole."""


@dataclass(kw_only=True)
class ConversationFit:
    """Fits conversations into rows of `seq_len` tokens and counts what became of them.

    `overlong`: "cut" cuts a conversation off at the end of the row, "skip" leaves it out. `num_left_out` counts those
    that were left out, with "cut" because no token of an answer fits. `lengths`: how many have how many tokens.
    """

    seq_len: int
    overlong: Literal["cut", "skip"]
    num_conversations: int = 0
    num_cut: int = 0
    num_left_out: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def fit(
        self, ids: np.ndarray, mask: np.ndarray, *, stop_ids: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """The tokens [T] and loss mask [T] to pack, up to the last answer; None when they are left out.

        An answer that the chat template leaves without an end token gets `stop_ids[0]`.
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
            self.num_left_out += 1
            return None
        self.num_cut += 1
        return ids[: self.seq_len], mask[: self.seq_len]

    @property
    def num_overlong(self) -> int:
        return self.num_cut + self.num_left_out

    def row_len(self, share: float = WHOLE_SHARE) -> int:
        """The shortest row that holds at least `share` of the conversations whole."""
        num_whole = 0
        for length, times in sorted(self.lengths.items()):
            num_whole += times
            if num_whole >= share * self.num_conversations:
                return length
        return 0

    def facts(self) -> dict[str, Any]:
        """The counts as plain data, for the artifact's manifest."""
        return {
            "seq_len": self.seq_len,
            "num_conversations": self.num_conversations,
            "num_cut": self.num_cut,
            "num_left_out": self.num_left_out,
            "row_len_for_99_percent": self.row_len(),
        }
