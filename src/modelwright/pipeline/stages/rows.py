"""Sets of training rows, and how a training uses them: text, conversations with a loss on answers, and rows of old
tasks for EWC; rows and images are read through the cache, and ahead where they are on a store.

The stage `pack` makes text and conversations for every run, and the further sets that a run's training stages name.
Each is a folder of its artifact with a subfolder for each split that contains documents.
"""

import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.core.config import ConfigError, DataError, derive_seed
from modelwright.data.augment.augmenter import Encode
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import WEIGHT, Document, Kind, Message, Split, says_something
from modelwright.data.images.store import ImageStore, has_images, image_layout, images_folder, open_images
from modelwright.data.rows.ahead import LookaheadLoader, PlannedRows
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.cache.reader import DISK, MEMORY, SOURCE, BlockReader
from modelwright.data.rows.cache.row_cache import RowCacheConfig, open_cache, remove_leftovers
from modelwright.data.rows.examples import ConversationFit, template_variables
from modelwright.data.rows.loader import PackedLoader, PackedRows, row_layout
from modelwright.data.rows.pack import Origin, PackConfig, TokenSequence, pack, row_score, row_source
from modelwright.data.tokenizer.chat import ChatLoss
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.report.blocks import Block, Table, count, percent, seconds
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stage import RowSet, RunConfig, StageContext
from modelwright.train.objective import HeldoutBatches, Objective
from modelwright.train.technique import Technique, TechniqueBuilder
from modelwright.train.techniques.ewc import EwcConfig


def heldout_sample(folder: Path, config: RunConfig, *, batch_rows: int) -> Sequence[TokenBatch]:
    """Returns held-out batches with about `config.validation_tokens`, always the same ones."""
    if not folder.is_dir():
        return ()
    packed = PackedRows(folder)
    group_tokens = packed.seq_len * packed.group_size
    requested = config.validation_tokens // group_tokens if config.validation_tokens else packed.num_groups
    if requested >= packed.num_groups:
        return HeldoutBatches(packed, batch_rows=batch_rows)
    loader = PackedLoader(packed, batch_rows=batch_rows, seed=derive_seed(config.seed, "heldout"))
    return [loader.batch(number) for number in range(max(1, requested // batch_rows))]


@dataclass(frozen=True, kw_only=True)
class RowUse:
    """Differences between stages that learn from the rows and those that generate their training data from them."""

    heldout: Callable[..., Sequence[TokenBatch]] = heldout_sample
    """Makes the held-out batches; called like `heldout_sample`."""
    updates_per_row: Callable[[Any], float] = lambda training: 1.0
    """Rows in the updates of an epoch for each row of the stage, from the settings of the stage."""
    learns_by_heart: bool = True
    """True if a model that sees the rows too often learns them by heart."""
    compares_rows: bool = False
    """True if the loss compares the rows of a batch with each other: held-out batches then have the size of those in
    training, whatever the number of processes."""
    techniques: Callable[[Objective, Sequence[TokenBatch], Path], Sequence[TechniqueBuilder]] = (
        lambda objective, heldout, folder: ()
    )
    """Makes further techniques, from the objective, the held-out batches and the folder of the stage."""


Sequences = Iterator[TokenSequence]
SHOWN_EVERY = 256
TEXT_KINDS: tuple[Kind, ...] = ("prose", "code")
ROW_LEN_STEP = 64
"""Suggested row lengths are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """Inputs of packing, and the stage's output."""

    context: StageContext
    config: RunConfig
    settings: PackConfig
    tokenizer: Tokenizer
    clean: Path
    """Artifact of the stage clean."""
    text_kinds: tuple[Kind, ...] = field(default=TEXT_KINDS)
    """Kinds of documents in `TEXT_ROWS`."""

    def documents(self, split: Split, *kinds: Kind) -> Iterator[Document]:
        """Yields the documents of a split, those with a weight as many times as an epoch has them: of a fraction, the
        texts with the smallest hashes.
        """
        for document in read_kept(self.clean, split=split, kinds=kinds):
            weight = float(document.meta.get(WEIGHT, 1.0)) if split == "train" else 1.0
            place = derive_seed(0, WEIGHT, document.text) / 2**63 if weight % 1 else 1.0
            yield from repeat(document, int(weight) + (place < weight % 1))

    def pack(self, name: str, sequences: Sequences, *, group_size: int = 1) -> dict[str, Any]:
        """Packs one split of a set, such as `pretrain/train`; adds its report to the artifact's facts and returns it.
        {} if no sequence is left to pack. group_size: see `data.pack.pack`.
        """

        def counted() -> Sequences:
            self.context.progress.begin(f"pack {name}", 0, "documents")
            for number, sequence in enumerate(sequences, start=1):
                yield sequence
                if number % SHOWN_EVERY == 0:
                    self.context.progress.advance(number)
            self.context.progress.end()

        shown = counted()
        first: list[TokenSequence] = []
        for sequence in shown:  # up to the first that is not skipped: without one, no folder may be written
            first.append(sequence)
            if self.settings.long_documents != "skip" or len(sequence.ids) <= self.settings.seq_len:
                break
        else:
            return {}
        output = self.context.output
        report = pack(
            chain(first, shown), output.path / name, self.settings,
            vocab_size=self.tokenizer.vocab_size, eos_id=self.tokenizer.eos_id, group_size=group_size,
        )  # fmt: skip
        output.facts[name] = asdict(report)
        return output.facts[name]

    def labeled(
        self, document: Document, ids: np.ndarray, mask: np.ndarray | None = None, *, part: int = 0
    ) -> TokenSequence:
        """Returns a sequence of a document, with its labels. part: its number among those of the document."""
        is_kept = self.settings.keep_documents and document.split == "train"
        return TokenSequence(ids, mask, *self.labels(document), origin=Origin(document, part) if is_kept else None)

    def labels(self, document: Document) -> tuple[str, float | None]:
        """Returns the labels that are stored with the rows of a document: its source and its score."""
        return row_source(document, self.settings.group_by), row_score(document, self.settings.score)


def new_fit(job: PackJob) -> ConversationFit:
    """Returns the fit of conversations into rows, by the settings of packing."""
    overlong = "skip" if job.settings.long_documents == "skip" else "split"
    return ConversationFit(seq_len=job.settings.seq_len, overlong=overlong)


def _pack_all(job: PackJob, split: Split) -> None:
    fit = new_fit(job)
    # Conversations follow the texts; as texts they would be packed twice.
    kinds = tuple(kind for kind in job.text_kinds if kind != "qa")
    texts = _texts(replace(job, text_kinds=kinds), split)
    job.pack(f"{ALL_ROWS.name}/{split}", chain(texts, _conversations(job, split, fit)))


def _texts(job: PackJob, split: Split) -> Sequences:
    waiting: deque[Document] = deque()

    def texts() -> Iterator[str]:
        for document in job.documents(split, *job.text_kinds):
            if not document.is_undesirable:
                waiting.append(document)
                yield document.text

    # Documents are encoded some blocks ahead; they wait in the same order.
    encoded = job.tokenizer.encode_documents(texts(), num_threads=job.config.hardware.num_threads)
    return (job.labeled(waiting.popleft(), ids) for ids in encoded)


def _pack_chats(job: PackJob, split: Split) -> None:
    """Packs rendered chats; the targets are the assistant's turns, with the token that ends each."""
    fit = new_fit(job)
    report = job.pack(f"{CHAT_ROWS.name}/{split}", _conversations(job, split, fit))
    if not fit.num_conversations:
        return
    job.context.output.facts[f"pairs/{split}"] = fit.facts()
    if report:
        reasons = {"no room for an answer": fit.num_dropped} if fit.num_dropped else {}
        report |= {"num_sequences": fit.num_conversations, "num_cut": fit.num_truncated}
        report["skipped"] = {**report["skipped"], **reasons}
    if split != "train":
        return
    if fit.num_overlong:
        text = (
            f"pack: {fit.num_overlong:,} of {fit.num_conversations:,} question/answer pairs are longer than a row "
            f"(pack.seq_len {fit.seq_len}): "
        )
        suggestion = suggest_row_len(job.config, fit)
        if fit.num_dropped == fit.num_conversations and any(stage.rows is CHAT_ROWS for stage in job.config.trainings):
            raise DataError(f"{text}none of them fits, so there is nothing to fine-tune on; {suggestion}")
        parts = [f"{fit.num_truncated:,} are truncated"] if fit.num_truncated else []
        if fit.num_dropped:
            why = " because no answer fits" if fit.overlong == "split" else ""
            parts.append(f"{fit.num_dropped:,} are dropped{why}")
        job.context.progress.note(f"{text}{', '.join(parts)}; {suggestion}")
    tell_empty_answers(job, fit)


def _conversations(job: PackJob, split: Split, fit: ConversationFit) -> Sequences:
    num_prompts = 0
    for document in job.documents(split, "qa"):
        num_prompts += not document.has_answer
        if document.is_undesirable or not document.has_answer:
            continue
        # Dropped parts keep their number: augmentation finds the copy of a part by it.
        for part, fitted in enumerate(_chats(job.tokenizer, document, job.settings.chat_loss, fit)):
            if fitted:
                yield job.labeled(document, *fitted, part=part)
    if num_prompts:
        job.context.progress.note(f"pack: {num_prompts:,} prompts of {split} have no answer to learn from")


def _chats(
    tokenizer: Tokenizer, document: Document, loss: ChatLoss, fit: ConversationFit
) -> Iterator[tuple[np.ndarray, np.ndarray] | None]:
    """Encodes a conversation as sequences, each with ids and a loss mask; None for one that is dropped."""
    try:
        sequences = tokenizer.chat.encode_training_chats(
            document.messages, tools=document.tools, loss=loss, variables=template_variables(document)
        )
    except DataError as error:
        raise DataError(f"{document.id}: {error}") from None
    fit.num_empty_answers += num_empty_answers(document.messages)
    return (fit.fit(ids, mask, stop_ids=tokenizer.stop_ids) for ids, mask in sequences)


@dataclass(frozen=True)
class TextEncoder:
    """Encodes documents as in `TEXT_ROWS`: begin token, text, end token."""

    tokenizer: Path

    def load(self) -> Encode:
        tokenizer = Tokenizer.load(self.tokenizer)
        return lambda document: [TokenSequence(tokenizer.encode_document(document.text))]


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes documents as in `CHAT_ROWS`; a sequence that is dropped is empty."""

    tokenizer: Path
    seq_len: int
    loss: ChatLoss

    def load(self) -> Encode:
        tokenizer = Tokenizer.load(self.tokenizer)

        def encode(document: Document) -> list[TokenSequence]:
            # Skipped and not cut: half of a changed answer is worse than the original.
            fit = ConversationFit(seq_len=self.seq_len, overlong="skip")
            chats = _chats(tokenizer, document, self.loss, fit)
            return [TokenSequence(*fitted) if fitted else TokenSequence([], []) for fitted in chats]

        return encode


def num_empty_answers(turns: Sequence[Message]) -> int:
    return sum(turn["role"] == "assistant" and not says_something(turn) for turn in turns)


def tell_empty_answers(job: PackJob, fit: ConversationFit) -> None:
    if fit.num_empty_answers:
        job.context.progress.note(
            f"pack: {fit.num_empty_answers:,} empty turns of the assistant are context and not learned, because they "
            "would teach to end an answer before its first word"
        )


def suggest_row_len(config: RunConfig, fit: ConversationFit) -> str:
    """Returns the settings with which 99% of the conversations fit into a row, in words."""
    # Rounded up to the step.
    requested = -(-fit.row_len() // ROW_LEN_STEP) * ROW_LEN_STEP
    if requested <= fit.seq_len:
        return "more than 99% of them fit"
    if config.init_from and requested > config.model.max_seq_len:
        return f"99% of them fit into {requested} tokens, the model's context is {config.model.max_seq_len}"
    words = [f"--pack.seq_len {requested}"]
    if requested > config.model.max_seq_len:
        words.append(f"--model.max_seq_len {requested}")
    for stage in config.trainings:
        training, num_rows = config.section(stage), stage.trained_rows
        try:
            training.batch_rows(requested * num_rows)
        except ConfigError:  # the longer rows do not divide the stage's batch: suggest one of as many rows as now
            num_groups = training.batch_rows(fit.seq_len * num_rows)
            words.append(f"--{stage.name}.batch_tokens {num_groups * num_rows * requested}")
    return f"99% of them fit with {' '.join(words)}"


TEXT_ROWS = RowSet(
    name="pretrain",
    title="pretraining",
    pack=lambda job, split: job.pack(f"pretrain/{split}", _texts(job, split)),
    stdlib_bytes=20e6,
    encoder=lambda settings, tokenizer: TextEncoder(tokenizer),
)
CHAT_ROWS = RowSet(
    name="sft",
    title="fine-tuning",
    pack=_pack_chats,
    encoder=lambda settings, tokenizer: ChatEncoder(tokenizer, settings.seq_len, settings.chat_loss),
    if_empty="there are no question/answer pairs to learn from; the model stays as it was",
    stdlib_bytes=4e6,
)
ALL_ROWS = RowSet(name="all", title="text and conversations", pack=_pack_all, stdlib_bytes=24e6)


class OldRows(Sequence[TokenBatch]):
    """Groups of rows as batches, read on access."""

    def __init__(self, packed: PackedRows, groups: Sequence[int]) -> None:
        self.packed = packed
        self.groups = groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> TokenBatch:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.packed.gather(np.array([self.groups[index]]))


def old_rows(packed: PackedRows, config: EwcConfig, seed: int) -> Sequence[TokenBatch]:
    """Returns the rows on which EWC estimates the importance of weights; none if it is off. Raises `ConfigError` if no
    row comes from its source.
    """
    if not config.strength:
        return ()
    names = [config.source] if config.source else list(packed.sources)
    if not any(packed.sources.get(name) for name in names):
        raise ConfigError(
            f"ewc.source: no row comes from {config.source!r}; name one of {', '.join(packed.sources)}, or replay old "
            "texts"
        )
    groups = np.concatenate([packed.source_groups(name) for name in names]).tolist()
    return OldRows(packed, random.Random(seed).sample(groups, min(config.num_rows, len(groups))))


ROW_CACHE = "row_cache"
"""Name of the technique, and of its figures among the facts of a stage."""
_PLACES = {MEMORY: "memory of the host", DISK: "local disk", SOURCE: "where the rows lie"}


@dataclass(frozen=True)
class TrainingData:
    """Training data of a stage. images: images of the rows; None for rows without images."""

    rows: PackedRows
    images: ImageStore | None

    @property
    def readers(self) -> list[BlockReader[Any]]:
        """Readers of rows and images that are not mapped into memory."""
        readers = [self.rows.reader, *([self.images.reader] if self.images else [])]
        return [reader for reader in readers if isinstance(reader, BlockReader)]


@contextmanager
def training_data(folder: Path, config: RowCacheConfig, context: StageContext) -> Iterator[TrainingData]:
    """Opens the packed rows in a folder and their images; closes them, and leaves the cache, on exit."""
    num_ahead = config.num_batches_ahead
    if config.enabled:
        images = images_folder(folder.parent, folder.name)
        layouts = [row_layout(folder), *([image_layout(images)] if has_images(images) else [])]
        with open_cache(config, *layouts, note=context.progress.note) as (rows, *others):
            stores = [ImageStore(images, reader, num_ahead=num_ahead) for reader in others]
            yield TrainingData(PackedRows(folder, rows), stores[0] if stores else None)
        return
    # The cache may have been switched off after a run that was killed left files in its folder.
    remove_leftovers(config)
    data = TrainingData(PackedRows(folder), open_images(folder.parent, folder.name, num_ahead=num_ahead))
    try:
        yield data
    finally:
        for reader in data.readers:
            reader.close()


def read_ahead(
    loader: PlannedRows, data: TrainingData, config: RowCacheConfig
) -> tuple[PlannedRows, Sequence[TechniqueBuilder]]:
    """Returns a loader that reads rows before they are needed, with a technique that adds the figures of each step to
    the record, such as how long batches waited, and their sums to the facts of the stage; where rows are mapped into
    memory, the loader itself.
    """
    reader = loader.rows.reader
    if not isinstance(reader, BlockReader):
        return loader, []
    readers, before = data.readers, dict[str, float]()

    def metrics() -> Mapping[str, float]:
        # The readers count from their start; a record has the changes since the one before it.
        sums = _sums(readers)
        blocks = {f"cache/{name}_blocks": float(number) for name, number in sums["blocks"].items()}
        now = {**blocks, "cache/source_bytes": float(sums["bytes"][SOURCE]), "cache/wait_s": sums["wait_s"]}
        changes = {name: value - before.get(name, 0.0) for name, value in now.items()}
        before.update(now)
        return changes

    technique = Technique(name=ROW_CACHE, metrics=metrics, summary=lambda: _sums(readers), needs=frozenset())
    return LookaheadLoader(loader, reader, num_ahead=config.num_batches_ahead), [lambda run: technique]


def _sums(readers: Sequence[BlockReader[Any]]) -> dict[str, Any]:
    """Adds up the figures of the readers and of the tiers that they read from."""
    # Rows and images may read through the same tiers, which count once.
    tiers = {id(reader.tiers): reader.tiers.figures for reader in readers}
    return _added([asdict(reader.figures) for reader in readers]) | _added([asdict(one) for one in tiers.values()])


def _added(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up numbers, and numbers by tier, that have the same names."""
    first = figures[0]
    return {
        name: _added([one[name] for one in figures]) if isinstance(value, dict) else sum(one[name] for one in figures)
        for name, value in first.items()
    }


def cache_blocks(stage: StageData) -> Sequence[Block]:
    """Returns the table of the report about the cache; none where rows were mapped into memory."""
    facts = stage.facts.get(ROW_CACHE)
    if not facts:
        return []
    blocks, num_bytes = facts["blocks"], facts["bytes"]
    total = max(1, sum(blocks.values()))
    waits = sorted(record["cache/wait_s"] for record in stage.records() if "cache/wait_s" in record)
    rows = [
        [title, count(blocks[name]), percent(blocks[name] / total), size(num_bytes[name])]
        for name, title in _PLACES.items()
    ]
    ready = facts["num_ready"] / max(1, facts["num_rows"])
    caption = f"Of what batches needed, {percent(ready)} was there before they were asked for"
    if waits:
        p99 = waits[min(len(waits) - 1, int(0.99 * len(waits)))]
        caption += f"; batches waited {seconds(statistics.median(waits))} (median) and {seconds(p99)} (p99)"
    caption += (
        f". Blocks moved towards memory {count(facts['num_promoted'])} times, and {count(facts['num_demoted'])} "
        "were displaced from memory or the disk; these are the figures of the first process since its last start."
    )
    if facts["num_damaged"]:
        caption += f" {count(facts['num_damaged'])} blocks of the cache were damaged and read again."
    return [Table(["read from", "blocks", "share", "bytes"], rows, "Row cache", caption, numeric=(1, 2, 3))]
