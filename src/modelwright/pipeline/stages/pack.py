"""pack: kept documents to rows of tokens: pretraining and question/answer rows, training and held-out.

artifact/pretrain/train, pretrain/heldout: documents of kind prose and code; artifact/sft/train, sft/heldout:
conversations with a mask that leaves only the answers to be learned. A set without documents has no folder.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from modelwright.core.config import dump
from modelwright.core.errors import DataError
from modelwright.data.clean import read_kept
from modelwright.data.document import SPLITS, Document, Message, Split
from modelwright.data.pack import LossMask, TokenIds, pack
from modelwright.data.tokenizer import Tokenizer
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import Stage, StageContext
from modelwright.pipeline.stages.lineage import tokenizer_stage

T = TypeVar("T")
AT_ONCE = 256
PRETRAIN_KINDS = ("prose", "code")


def pack_stage(config: RunConfig) -> Stage:
    """Artifact: shard folders (see the module). Facts: one packing report per folder."""
    tokenizer_from = tokenizer_stage(config)

    def run(context: StageContext) -> None:
        _run(context, config, Tokenizer.load(context.parents[tokenizer_from]))

    return Stage(
        name="pack",
        title="Packing rows of tokens",
        settings=dump(config.pack),
        parents=("clean", tokenizer_from),
        run=run,
    )


def _run(context: StageContext, config: RunConfig, tokenizer: Tokenizer) -> None:
    clean, out = context.parents["clean"], context.output.path
    for split in SPLITS:
        for purpose in ("pretrain", "sft"):
            name = f"{purpose}/{split}"
            if purpose == "pretrain":
                sequences, settings = _documents(clean, split, tokenizer), config.pack
            else:
                sequences, settings = _conversations(clean, split, tokenizer), replace(config.pack, overlong="skip")
            counted = _counted(sequences, context, f"pack {name}")
            first = list(islice(counted, 1))
            if first:
                sequence = _chain(first, counted)
                report = pack(sequence, out / name, settings, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
                context.output.facts[name] = asdict(report)
            context.progress.end()
    if "pretrain/train" not in context.output.facts and "sft/train" not in context.output.facts:
        raise DataError("pack: no training document is left after cleaning; see dropped text in the clean stage")


def _documents(clean: Path, split: Split, tokenizer: Tokenizer) -> Iterator[tuple[TokenIds, LossMask | None]]:
    """Start token, then the text; the end token is added by `pack`."""
    for documents in _groups(_of_kinds(clean, split), AT_ONCE):
        for ids in tokenizer.encode_batch([document.text for document in documents]):
            yield [tokenizer.bos_id, *ids], None


def _of_kinds(clean: Path, split: Split) -> Iterator[Document]:
    return (document for document in read_kept(clean, split=split) if document.kind in PRETRAIN_KINDS)


def _conversations(clean: Path, split: Split, tokenizer: Tokenizer) -> Iterator[tuple[TokenIds, LossMask | None]]:
    """The rendered chat of each conversation; answers, with the token that ends them, are the targets."""
    for document in read_kept(clean, split=split, kind="qa"):
        yield answers_masked(document.messages, tokenizer)


def answers_masked(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
    """Token ids of a conversation, and 1 where a token belongs to one of the assistant's turns."""
    whole = list(tokenizer.encode_chat(messages, add_generation_prompt=False))
    mask = np.zeros(len(whole), dtype=np.uint8)
    for place, turn in enumerate(messages):
        if turn["role"] == "assistant":
            before = list(tokenizer.encode_chat(messages[:place], add_generation_prompt=True))
            after = list(tokenizer.encode_chat(messages[: place + 1], add_generation_prompt=False))
            if whole[: len(after)] != after or after[: len(before)] != before:
                raise DataError("the chat template rewrites earlier turns, so answers cannot be told from questions")
            mask[len(before) : len(after)] = 1
    return whole, mask


def _counted(
    sequences: Iterator[tuple[TokenIds, LossMask | None]], context: StageContext, name: str
) -> Iterator[tuple[TokenIds, LossMask | None]]:
    context.progress.begin(name, 0, "documents")
    for number, sequence in enumerate(sequences, start=1):
        yield sequence
        if number % AT_ONCE == 0:
            context.progress.advance(number)


def _groups(items: Iterable[T], length: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while group := list(islice(iterator, length)):
        yield group


def _chain(first: list[T], rest: Iterator[T]) -> Iterator[T]:
    yield from first
    yield from rest
