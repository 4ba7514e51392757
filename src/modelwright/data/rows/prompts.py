"""Prompts for rollouts: the turns before an answer, their tokens, and the record's fields about the right answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError
from modelwright.core.records import json_line, read_records
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, Message
from modelwright.data.rows.batching.order import permutation
from modelwright.data.tokenizer.tokenizer import Tokenizer

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
        return cls(ids=tokenizer.encode_prompt(messages), messages=messages, fields=fields)


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
