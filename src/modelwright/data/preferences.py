"""Preferences to token sequences that fit into rows: pairs of a chosen and a rejected answer, and single answers with a
label.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from modelwright.data.document import Document, Message, says_something
from modelwright.data.fit import ConversationFit
from modelwright.data.tokenizer import Tokenizer

PROMPT_TOO_LONG, TOO_LONG = "prompt longer than a row", "longer than a row"
EMPTY, SAME = "empty answer", "chosen and rejected are the same"


@dataclass(frozen=True)
class PromptedAnswer:
    """A prompt with an answer, truncated to the length of a row."""

    ids: np.ndarray
    """[T] int64."""
    mask: np.ndarray
    """[T] uint8, 1 for the tokens of the answer."""

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the answer."""
        return int(np.flatnonzero(self.mask)[0])

    @property
    def prompt(self) -> bytes:
        """The prompt's token ids, for comparison."""
        return self.ids[: self.prompt_len].tobytes()

    def answered_by(self, other: "PromptedAnswer", *, seq_len: int) -> "PromptedAnswer":
        """This prompt with the answer of another one, truncated to `seq_len` tokens."""
        own, theirs = self.prompt_len, other.prompt_len
        ids = np.concatenate([self.ids[:own], other.ids[theirs:]])[:seq_len]
        mask = np.concatenate([self.mask[:own], other.mask[theirs:]])[:seq_len]
        return PromptedAnswer(ids, mask)


@dataclass(kw_only=True)
class PreferenceFit:
    """Encodes preferences and truncates their answers to the length of a row. What cannot be learned from is counted
    in `skipped`, by reason.
    """

    tokenizer: Tokenizer
    answers: ConversationFit
    """Fits each answer with its prompt; a pair has two."""
    num_preferences: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])

    def pair(self, document: Document) -> tuple[PromptedAnswer, PromptedAnswer] | None:
        """The chosen and the rejected answer of a pair; None if it is skipped."""
        chosen, rejected = document.messages[document.prompt_turns :], document.rejected
        self.num_preferences += 1
        found = self._completion(document, chosen), self._completion(document, rejected)
        if isinstance(found[0], str) or isinstance(found[1], str):
            return self._skip(next(reason for reason in found if isinstance(reason, str)))
        if np.array_equal(found[0].ids, found[1].ids):
            return self._skip(SAME)
        return found[0], found[1]

    def single(self, document: Document) -> PromptedAnswer | None:
        """The answer of an unpaired preference; None if it is skipped."""
        self.num_preferences += 1
        found = self._completion(document, document.messages[document.prompt_turns :])
        return self._skip(found) if isinstance(found, str) else found

    def facts(self) -> dict[str, Any]:
        """The counts as plain data."""
        return {
            "seq_len": self.answers.seq_len,
            "num_preferences": self.num_preferences,
            "num_truncated": self.answers.num_truncated,
            "skipped": dict(self.skipped),
        }

    def _skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def _completion(self, document: Document, answer: Sequence[Message]) -> PromptedAnswer | str:
        """The prompt of a document with an answer; why it cannot be learned from."""
        if not says_something(answer[-1]):
            return EMPTY
        prompt = document.messages[: document.prompt_turns]
        ids, mask = self.tokenizer.encode_completion([*prompt, *answer], len(prompt), tools=document.tools)
        fitted = self.answers.fit(ids, mask, stop_ids=self.tokenizer.stop_ids)
        if fitted is not None:
            return PromptedAnswer(*fitted)
        return TOO_LONG if mask[: self.answers.seq_len].any() else PROMPT_TOO_LONG


def with_mismatched_answers(
    completions: Iterable[PromptedAnswer], *, seq_len: int
) -> Iterator[tuple[PromptedAnswer, PromptedAnswer]]:
    """Each prompt with its own answer, and with the last answer before it to another prompt; the first ones, before
    which there is none, with the first answer to another prompt. Yields nothing if all prompts are equal.

    These are the pairs by which KTO estimates a KL divergence (Ethayarajh et al. 2024, section 4.1). Neighbors often
    have the same prompt, where several answers to it were judged; they would not be mismatched.
    """
    waiting: list[PromptedAnswer] = []
    previous = other = None
    for completion in completions:
        if previous is not None and completion.prompt != previous.prompt:
            other = previous
        previous = completion
        if other is None:
            waiting.append(completion)
            continue
        yield from ((early, early.answered_by(completion, seq_len=seq_len)) for early in waiting)
        waiting.clear()
        yield completion, completion.answered_by(other, seq_len=seq_len)
