"""Conversations, preferences and prompts as token sequences that fit into rows; those that do not fit are counted.

A conversation is truncated at its end, as in TRL and torchtune. The tokens that remain are still correct targets, and
no end token follows them, so a truncated answer does not teach the model to stop early. A preference is a pair of a
chosen and a rejected answer, or a single answer with a label; one that does not fit is dropped. A prompt for rollouts
has the turns before an answer, their tokens, and the record's fields about the right answer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from modelwright.core.artifacts import ArtifactError, write_atomic
from modelwright.core.config import derive_seed
from modelwright.core.records import json_line, read_records
from modelwright.data.document import Document, Message, says_something
from modelwright.data.rows.order import permutation
from modelwright.data.tokenizer.tokenizer import Tokenizer

WHOLE_SHARE = 0.99
"""Minimum share of the conversations that fit into a row of the suggested length."""
PROMPT_TOO_LONG, TOO_LONG = "prompt longer than a row", "longer than a row"
EMPTY, SAME = "empty answer", "chosen and rejected are the same"


def template_variables(document: Document) -> Mapping[str, Any]:
    """Returns the variables of the chat template that a record sets for itself, such as `enable_thinking`."""
    return document.meta.get("chat_template_kwargs", {})


@dataclass(kw_only=True)
class ConversationFit:
    """Truncates conversations to `seq_len` tokens.

    `overlong`: "split" truncates a longer conversation, "skip" drops it. `num_dropped` includes conversations whose
    truncation would leave no token of an answer. `lengths`: number of conversations by length in tokens.
    `num_empty_answers`: blank turns of the assistant, which are context and not learned.
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
        """Returns the token ids [T] and the loss mask [T] to pack, or None if the conversation is dropped.

        Tokens after the last answer are removed. An answer without an end token gets `stop_ids[0]`. An end token
        need not be the last one: templates may mark the line end after it as well.
        """
        self.num_conversations += 1
        answered = np.flatnonzero(mask)
        end = int(answered[-1]) + 1 if len(answered) else 0
        ids, mask = ids[:end], mask[:end]
        before = np.flatnonzero(mask == 0)
        if end and not np.isin(ids[int(before[-1]) + 1 if len(before) else 0 :], stop_ids).any():
            ids, mask = np.append(ids, stop_ids[0]), np.append(mask, np.uint8(1))
        self.lengths[len(ids)] += 1
        if end and len(ids) <= self.seq_len:
            return ids, mask
        if self.overlong == "skip" or not mask[1 : self.seq_len].any():  # the first token is never predicted
            self.num_dropped += 1
            return None
        self.num_truncated += 1
        return ids[: self.seq_len], mask[: self.seq_len]

    @property
    def num_overlong(self) -> int:
        return self.num_truncated + self.num_dropped

    def row_len(self, share: float = WHOLE_SHARE) -> int:
        """Returns the smallest row length, in tokens, into which at least `share` of the conversations fit."""
        num_whole = 0
        for length, times in sorted(self.lengths.items()):
            num_whole += times
            if num_whole >= share * self.num_conversations:
                return length
        return 0

    def facts(self) -> dict[str, Any]:
        """Returns the counts as plain data for the artifact's manifest."""
        return {
            "seq_len": self.seq_len,
            "num_conversations": self.num_conversations,
            "num_truncated": self.num_truncated,
            "num_dropped": self.num_dropped,
            "num_empty_answers": self.num_empty_answers,
            "row_len_for_99_percent": self.row_len(),
        }


@dataclass(frozen=True)
class PromptedAnswer:
    """A prompt with an answer, truncated to the length of a row."""

    ids: np.ndarray
    """Token ids [T] int64."""
    mask: np.ndarray
    """Loss mask [T] uint8, 1 for the tokens of the answer."""

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the answer."""
        return int(np.flatnonzero(self.mask)[0])

    @property
    def prompt(self) -> bytes:
        """Token ids of the prompt as bytes, for comparison."""
        return self.ids[: self.prompt_len].tobytes()

    def answered_by(self, other: "PromptedAnswer", *, seq_len: int) -> "PromptedAnswer":
        """Returns this prompt with the answer of another one, truncated to `seq_len` tokens."""
        own, theirs = self.prompt_len, other.prompt_len
        ids = np.concatenate([self.ids[:own], other.ids[theirs:]])[:seq_len]
        mask = np.concatenate([self.mask[:own], other.mask[theirs:]])[:seq_len]
        return PromptedAnswer(ids, mask)


@dataclass(kw_only=True)
class PreferenceFit:
    """Encodes preferences and truncates answers to the length of a row. `skipped`: unusable preferences by reason."""

    tokenizer: Tokenizer
    answers: ConversationFit
    """Fits each answer with its prompt; a pair has two."""
    num_preferences: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])

    def pair(self, document: Document) -> tuple[PromptedAnswer, PromptedAnswer] | None:
        """Returns the chosen and the rejected answer of a pair; None if it is skipped."""
        chosen, rejected = document.messages[document.prompt_turns :], document.rejected
        self.num_preferences += 1
        found = self._completion(document, chosen), self._completion(document, rejected)
        if isinstance(found[0], str) or isinstance(found[1], str):
            self.skipped[next(reason for reason in found if isinstance(reason, str))] += 1
            return None
        # Different texts may be equal after truncation.
        if np.array_equal(found[0].ids, found[1].ids):
            self.skipped[SAME] += 1
            return None
        return found[0], found[1]

    def single(self, document: Document) -> PromptedAnswer | None:
        """Returns the answer of an unpaired preference; None if it is skipped."""
        self.num_preferences += 1
        found = self._completion(document, document.messages[document.prompt_turns :])
        if isinstance(found, str):
            self.skipped[found] += 1
            return None
        return found

    def facts(self) -> dict[str, Any]:
        """Returns the counts as plain data."""
        return {
            "seq_len": self.answers.seq_len,
            "num_preferences": self.num_preferences,
            "num_truncated": self.answers.num_truncated,
            "skipped": dict(self.skipped),
        }

    def _completion(self, document: Document, answer: Sequence[Message]) -> PromptedAnswer | str:
        """Returns the prompt of a document with an answer, or the reason for which it is skipped."""
        if not says_something(answer[-1]):
            return EMPTY
        prompt = document.messages[: document.prompt_turns]
        ids, mask = self.tokenizer.chat.encode_completion(
            [*prompt, *answer], len(prompt), tools=document.tools, variables=template_variables(document)
        )
        fitted = self.answers.fit(ids, mask, stop_ids=self.tokenizer.stop_ids)
        if fitted is not None:
            return PromptedAnswer(*fitted)
        return TOO_LONG if mask[: self.answers.seq_len].any() else PROMPT_TOO_LONG


def with_mismatched_answers(
    completions: Iterable[PromptedAnswer], *, seq_len: int
) -> Iterator[tuple[PromptedAnswer, PromptedAnswer]]:
    """Yields each prompt with its own answer, and with the last earlier answer to another prompt; the first ones, which
    lack an earlier one, with the first answer to another prompt. Yields nothing if all prompts are equal.

    These are the pairs by which KTO estimates a KL divergence (Ethayarajh et al. 2024, section 4.1). Neighbors often
    have the same prompt, where several answers to it were judged; they would not be mismatched.
    """
    waiting: list[PromptedAnswer] = []
    previous = other = None
    for completion in completions:
        if previous is not None and completion.prompt != previous.prompt:
            other = previous
        previous = completion
        # The first completions wait until there is another prompt.
        if other is None:
            waiting.append(completion)
            continue
        yield from ((early, early.answered_by(completion, seq_len=seq_len)) for early in waiting)
        waiting.clear()
        yield completion, completion.answered_by(other, seq_len=seq_len)


FILE = "prompts.jsonl"
REFERENCE = "answer"
"""Field with the reference answer: the assistant's last turn in the record's conversation."""
_TURNS = ("question", "answer", "messages", "rejected", "title", "summary")
"""Fields of `Document.meta` with the conversation itself."""


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """A prompt, as rewards and the engine need it."""

    ids: Sequence[int]
    """Token ids up to the beginning of the answer."""
    messages: Sequence[Message]
    """The turns before the answer."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The reference answer under `answer`, and the fields of the record that its document keeps."""

    @classmethod
    def of(cls, document: Document, tokenizer: Tokenizer) -> "PromptRecord":
        """Splits a conversation into prompt and reference answer. Raises `DataError` if the template rejects it."""
        messages, fields = document.messages, {key: document.meta[key] for key in document.meta if key not in _TURNS}
        if messages[-1]["role"] == "assistant":
            fields[REFERENCE] = messages[-1]["content"]
            messages = messages[:-1]
        ids = tokenizer.chat.encode_prompt(messages, tools=document.tools, variables=template_variables(document))
        return cls(ids=ids, messages=messages, fields=fields)


def write_prompts(folder: Path, prompts: Iterable[PromptRecord]) -> None:
    """Writes one JSON line for each prompt into `folder`."""
    lines = (json_line({"ids": [*one.ids], "messages": [*one.messages], "fields": one.fields}) for one in prompts)
    write_atomic(folder / FILE, "".join(lines))


def read_prompts(folder: Path) -> Sequence[PromptRecord]:
    """Reads the prompts of `write_prompts`. Raises `ArtifactError` if they are missing or damaged."""
    path = folder / FILE
    try:
        prompts = [PromptRecord(**record) for record in read_records(path)]
    except TypeError:
        prompts = []
    if not prompts:
        raise ArtifactError(f"{path}: is missing or damaged; run the pack stage again")
    return prompts


def prompt_numbers(first: int, count: int, *, num_prompts: int, seed: int) -> list[int]:
    """Returns the prompts at `count` places, from `first` on, of an endless order of newly shuffled epochs."""
    places = range(first, first + count)
    epochs = {place // num_prompts for place in places}
    orders = {epoch: permutation(derive_seed(seed, "prompts", epoch), num_prompts) for epoch in epochs}
    return [int(orders[place // num_prompts][place % num_prompts]) for place in places]
