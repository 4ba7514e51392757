"""pack: kept documents to rows of tokens: pretraining and question/answer rows, training and held-out.

artifact/pretrain/train, pretrain/heldout: documents of kind prose and code; artifact/sft/train, sft/heldout:
conversations with a mask that leaves only the answers to be learned. A set without documents has no folder.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from modelwright.core.config import dump
from modelwright.core.errors import DataError
from modelwright.data.clean import read_kept
from modelwright.data.document import SPLITS, Split
from modelwright.data.pack import LossMask, PackConfig, TokenIds, pack
from modelwright.data.tokenizer import Tokenizer
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import Stage, StageContext
from modelwright.pipeline.stages.lineage import tokenizer_stage

Sequence = tuple[TokenIds, LossMask | None]
Sequences = Iterator[Sequence]
SHOWN_EVERY = 256
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
    clean, out, threads = context.parents["clean"], context.output.path, config.hardware.num_threads
    for split in SPLITS:
        for purpose in ("pretrain", "sft"):
            name = f"{purpose}/{split}"
            if purpose == "pretrain":
                sequences, settings = _documents(clean, split, tokenizer, threads), config.pack
                last = tokenizer.eos_id
            else:
                sequences, settings = _conversations(clean, split, tokenizer), replace(config.pack, overlong="skip")
                last = tokenizer.end_id
            counted = _counted(sequences, context, f"pack {name}")
            too_long, first = _until_one_fits(counted, settings)
            if first is not None:
                report = pack(
                    chain(too_long, [first], counted), out / name, settings,
                    vocab_size=tokenizer.vocab_size, eos_id=last,
                )  # fmt: skip
                context.output.facts[name] = asdict(report)
    if "pretrain/train" not in context.output.facts and "sft/train" not in context.output.facts:
        raise DataError("pack: no training document is left after cleaning; see dropped text in the clean stage")


def _documents(clean: Path, split: Split, tokenizer: Tokenizer, threads: int) -> Sequences:
    """Begin token, text, end token."""
    texts = (document.text for document in read_kept(clean, split=split) if document.kind in PRETRAIN_KINDS)
    return ((ids, None) for ids in tokenizer.encode_documents(texts, num_threads=threads))


def _conversations(clean: Path, split: Split, tokenizer: Tokenizer) -> Sequences:
    """Rendered chats; what the assistant says, with the token that ends it, is the target."""
    return (tokenizer.encode_chat(document.messages) for document in read_kept(clean, split=split, kind="qa"))


def _until_one_fits(sequences: Sequences, settings: PackConfig) -> tuple[list[Sequence], Sequence | None]:
    """The sequences that `pack` would leave out before the first that it takes, and that one; `None` when all are."""
    left_out = []
    for sequence in sequences:
        if settings.overlong == "cut" or len(sequence[0]) <= settings.seq_len:
            return left_out, sequence
        left_out.append(sequence)
    return left_out, None


def _counted(sequences: Sequences, context: StageContext, name: str) -> Sequences:
    context.progress.begin(name, 0, "documents")
    for number, sequence in enumerate(sequences, start=1):
        yield sequence
        if number % SHOWN_EVERY == 0:
            context.progress.advance(number)
    context.progress.end()
