"""pack: kept documents to rows of tokens: pretraining and question/answer rows, training and held-out.

artifact/pretrain/train, pretrain/heldout: documents of kind prose and code, or the text of the question/answer pairs
where there is nothing else; artifact/sft/train, sft/heldout: conversations with a mask that selects only the answers. A
set without documents has no folder.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from modelwright.core.config import dump
from modelwright.core.errors import ConfigError, DataError
from modelwright.data.clean import read_kept
from modelwright.data.document import SPLITS, Document, Kind, Split
from modelwright.data.fit import ConversationFit
from modelwright.data.pack import PackConfig, TokenSequence, pack
from modelwright.data.row_labels import row_score, row_source
from modelwright.data.tokenizer import Tokenizer
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.stage import Stage, StageContext
from modelwright.pipeline.stages.stage_inputs import tokenizer_stage

Sequences = Iterator[TokenSequence]
SHOWN_EVERY = 256
TEXT_KINDS: tuple[Kind, ...] = ("prose", "code")
ROW_LEN_STEP = 64
"""Suggested row lengths are multiples of this."""


def pack_stage(config: RunConfig) -> Stage:
    """Artifact: shard folders (see the module). Facts: one packing report per folder, `pairs/<split>` on how the
    conversations fitted into the rows, and `pretrain_kinds`."""
    tokenizer_from = tokenizer_stage(config)
    config = replace(config, pack=with_labels(config))

    def run(context: StageContext) -> None:
        _run(context, config, Tokenizer.load(context.parents[tokenizer_from]))

    return Stage(
        name="pack",
        title="Packing rows of tokens",
        settings=dump(config.pack) | _label_settings(config.pack),
        parents=("clean", tokenizer_from),
        run=run,
        version=2,
    )


def with_labels(config: RunConfig) -> PackConfig:
    """The settings of packing, with the labels of rows that the trainings of the run ask for. Raises `ConfigError` if
    they ask for different ones.
    """
    wanted = [config.stage_config(name).batching for name in config.trainings]
    scores = sorted({batching.curriculum.score for batching in wanted} - {""})
    groups = sorted({batching.mixture.group_by for batching in wanted} - {"none"})
    for setting, names in (("curriculum.by", scores), ("mixture.weights", groups)):
        if len(names) > 1:
            raise ConfigError(
                f"batching.{setting}: the training stages need rows by {' and by '.join(names)}; choose one for all"
            )
    return replace(config.pack, score=scores[0] if scores else "", group_by=groups[0] if groups else "none")


def _label_settings(config: PackConfig) -> dict[str, str]:
    """The labels of rows that are not the default, for the digest."""
    labels = {"score": config.score, "group_by": config.group_by}
    return {name: value for name, value in labels.items() if value not in ("", "none")}


def _run(context: StageContext, config: RunConfig, tokenizer: Tokenizer) -> None:
    clean, facts = context.parents["clean"], context.output.facts
    kinds = pretraining_kinds(clean)
    facts["pretrain_kinds"] = list(kinds)
    if "qa" in kinds and "pretrain" in config.stages:
        context.progress.note(
            "pack: the sources hold question/answer pairs and no other text; pretraining learns from the pairs as text"
        )
    for split in SPLITS:
        texts = _documents(clean, split, kinds, tokenizer, config)
        _pack(context, config, f"pretrain/{split}", texts, tokenizer)
        overlong = "skip" if config.pack.long_documents == "skip" else "split"
        fit = ConversationFit(seq_len=config.pack.seq_len, overlong=overlong)
        chats = _conversations(clean, split, tokenizer, fit, config.pack)
        report = _pack(context, config, f"sft/{split}", chats, tokenizer)
        if not fit.num_conversations:
            continue
        facts[f"pairs/{split}"] = fit.facts()
        if report:
            reasons = {"no room for an answer": fit.num_dropped} if fit.num_dropped else {}
            report |= {"num_sequences": fit.num_conversations, "num_cut": fit.num_truncated}
            report["skipped"] = {**report["skipped"], **reasons}
        if split == "train":
            _tell_overlong(context, config, fit)
    if "pretrain/train" not in facts and "sft/train" not in facts:
        raise DataError(
            "pack: no training document is left after cleaning; see the dropped documents of the clean stage"
        )


def pretraining_kinds(clean: Path) -> tuple[Kind, ...]:
    """The kinds of documents that pretraining learns from: prose and code, or pairs where there is neither."""
    has_text = any(document.kind in TEXT_KINDS for document in read_kept(clean, split="train"))
    return TEXT_KINDS if has_text else ("qa",)


def _pack(
    context: StageContext, config: RunConfig, name: str, sequences: Sequences, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Pack one set, add its report to the artifact's facts and return it; {} if no sequence is left to pack."""
    sequences = _counted(sequences, context, f"pack {name}")
    first: list[TokenSequence] = []
    for sequence in sequences:
        first.append(sequence)
        if config.pack.long_documents != "skip" or len(sequence.ids) <= config.pack.seq_len:
            break
    else:
        return {}
    report = pack(
        chain(first, sequences), context.output.path / name, config.pack,
        vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id,
    )  # fmt: skip
    context.output.facts[name] = asdict(report)
    return context.output.facts[name]


def _documents(
    clean: Path, split: Split, kinds: tuple[Kind, ...], tokenizer: Tokenizer, config: RunConfig
) -> Sequences:
    """Begin token, text, end token."""
    labels: deque[tuple[str, float | None]] = deque()

    def texts() -> Iterator[str]:
        for document in read_kept(clean, split=split):
            if document.kind in kinds:
                labels.append(_labels(document, config.pack))
                yield document.text

    # Documents are encoded some blocks ahead; their labels wait in the same order.
    for ids in tokenizer.encode_documents(texts(), num_threads=config.hardware.num_threads):
        yield TokenSequence(ids, None, *labels.popleft())


def _conversations(
    clean: Path, split: Split, tokenizer: Tokenizer, fit: ConversationFit, config: PackConfig
) -> Sequences:
    """Rendered chats; the targets are what the assistant says, with the token that ends it."""
    for document in read_kept(clean, split=split, kind="qa"):
        try:
            sequences = tokenizer.encode_training_chats(document.messages)
        except DataError as error:
            raise DataError(f"{document.id}: {error}") from None
        labels = _labels(document, config)
        for ids, mask in sequences:
            if fitted := fit.fit(ids, mask, stop_ids=tokenizer.stop_ids):
                yield TokenSequence(*fitted, *labels)


def _labels(document: Document, config: PackConfig) -> tuple[str, float | None]:
    """What is stored with the rows of a document: its source and its score."""
    return row_source(document, config.group_by), row_score(document, config.score)


def _tell_overlong(context: StageContext, config: RunConfig, fit: ConversationFit) -> None:
    """Report the training conversations that are longer than a row. Raises `DataError` if fine-tuning has none left."""
    if not fit.num_overlong:
        return
    text = (
        f"pack: {fit.num_overlong:,} of {fit.num_conversations:,} question/answer pairs are longer than a row "
        f"(pack.seq_len {fit.seq_len}): "
    )
    suggestion = suggest_row_len(config, fit)
    if fit.num_dropped == fit.num_conversations and "sft" in config.stages:
        raise DataError(f"{text}none of them fits, so there is nothing to fine-tune on; {suggestion}")
    parts = [
        f"{fit.num_truncated:,} are truncated" if fit.num_truncated else "",
        f"{fit.num_dropped:,} are dropped{' because no answer fits' if fit.overlong == 'split' else ''}"
        if fit.num_dropped
        else "",
    ]
    context.progress.note(f"{text}{', '.join(filter(None, parts))}; {suggestion}")


def suggest_row_len(config: RunConfig, fit: ConversationFit) -> str:
    """The settings with which 99% of the conversations fit into a row."""
    requested = -(-fit.row_len() // ROW_LEN_STEP) * ROW_LEN_STEP
    if requested <= fit.seq_len:
        return "more than 99% of them fit"
    if config.init_from and requested > config.model.max_seq_len:
        return f"99% of them fit into {requested} tokens, the model's context is {config.model.max_seq_len}"
    words = [f"--pack.seq_len {requested}"]
    if requested > config.model.max_seq_len:
        words.append(f"--model.max_seq_len {requested}")
    for name in config.trainings:
        training = config.stage_config(name)
        try:
            training.batch_rows(requested)
        except ConfigError:
            words.append(f"--{name}.batch_tokens {training.batch_rows(fit.seq_len) * requested}")
    return f"99% of them fit with {' '.join(words)}"


def _counted(sequences: Sequences, context: StageContext, name: str) -> Sequences:
    context.progress.begin(name, 0, "documents")
    for number, sequence in enumerate(sequences, start=1):
        yield sequence
        if number % SHOWN_EVERY == 0:
            context.progress.advance(number)
    context.progress.end()
