"""Training batches of which some are wild: random labels, and a loss that counts many times as much.

That is what broken data or a broken loss weight does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from modelwright.core.config import derive_seed
from modelwright.data.augment.augmenter import CopyRecipe
from modelwright.data.document import Document
from modelwright.data.rows.ahead import AugmentedLoader
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import Origin, PackConfig, TokenSequence, pack
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.pipeline.augmenting import MethodBuilder
from modelwright.pipeline.stages.rows import TextEncoder
from modelwright.train.objective import Objective, Terms
from modelwright.train.technique import TechniqueBuilder
from modelwright.train.techniques.augmentation_strength import AugmentationStrengthConfig, augmentation_strength
from modelwright_claims.claim import Setting
from modelwright_claims.workbench import TOKENIZER, TRAIN_TEXTS, TextKind


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Documents of a run that are changed. methods: names, one of which is drawn for each document."""

    methods: tuple[str, ...]
    probability: float = 0.3
    """Probability of changing a document while the loss is between the thresholds; 0 changes none."""
    high_loss: float = 0.8
    low_loss: float = 0.3
    is_relative: bool = False
    """Thresholds are fractions of the first losses, not nats."""

    def strength(self) -> AugmentationStrengthConfig:
        return AugmentationStrengthConfig(
            probability=self.probability, high_loss=self.high_loss, low_loss=self.low_loss, relative=self.is_relative
        )


def augmented_batches(
    setting: Setting, augmentation: Augmentation, *, seq_len: int, batch_rows: int, seed: int, order: int
) -> tuple[AugmentedLoader, Sequence[TechniqueBuilder]]:
    """The batches, and the technique that sets the strength. order: seed of the order of the rows."""
    # The training text of `workbench.store_text`, packed once, with its documents beside the rows.
    folder = setting.folder / f"with-documents-{seq_len}"
    if not folder.exists():
        tokenizer = Tokenizer.load(setting.folder / TOKENIZER)
        texts: list[str] = json.loads((setting.folder / TRAIN_TEXTS).read_text(encoding="utf-8"))
        documents = [
            Document(id=str(number), text=text, kind="prose", split="train", source="text")
            for number, text in enumerate(texts)
        ]
        sequences = (TokenSequence(tokenizer.encode_document(one.text), origin=Origin(one)) for one in documents)
        config = PackConfig(seq_len=seq_len)
        pack(sequences, folder, config, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    rows = PackedRows(folder)
    recipe = CopyRecipe(
        folder=rows.folder,
        seq_len=seq_len,
        eos_id=rows.eos_id,
        seed=derive_seed(seed, "augmentation"),
        encoder=TextEncoder(setting.folder / TOKENIZER),
        methods=MethodBuilder(augmentation.methods, "{}"),
    )
    loader = AugmentedLoader(PackedLoader(rows, batch_rows=batch_rows, seed=order), recipe, num_workers=0)
    return loader, [partial(augmentation_strength, augmentation.strength(), loader)]


PROSE, CODE, SHUFFLED, RANDOM = range(4)
"""Kinds of text at a position of the stream."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shares of the rows of a stream; the rest is prose."""

    code: float
    garbage: float = 0.0


@dataclass
class Stream:
    """A `BatchSource` of prose, code and garbage; the row at a place of the stream depends on seed and place alone."""

    sources: Mapping[TextKind, PackedLoader]
    batch_rows: int
    kinds: np.ndarray
    """The kind of text at each position of the stream."""
    seed: int
    vocab_size: int

    @property
    def num_batches_per_epoch(self) -> int:
        return len(self.kinds) // self.batch_rows

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        share = self.batch_rows // world_size
        first = index * self.batch_rows + rank * share
        before = np.bincount(self.kinds[:first], minlength=4)
        numbers: dict[TextKind, int] = {"code": int(before[CODE]), "prose": int(before[PROSE] + before[SHUFFLED])}
        rows: list[TokenBatch] = []
        for place in range(first, first + share):
            kind = self.kinds[place]
            if kind == RANDOM:
                rows.append(self.random_row(place))
                continue
            source: TextKind = "code" if kind == CODE else "prose"
            loader, number = self.sources[source], numbers[source]
            row = loader.rows.gather(loader.order(number, number + 1))
            rows.append(self.shuffled_row(row, place) if kind == SHUFFLED else row)
            numbers[source] += 1
        return TokenBatch(
            input_ids_BT=torch.cat([row.input_ids_BT for row in rows]),
            labels_BT=torch.cat([row.labels_BT for row in rows]),
            positions_BT=torch.cat([row.positions_BT for row in rows]),
            segments_BT=torch.cat([row.segments_BT for row in rows]),
        )

    def random_row(self, place: int) -> TokenBatch:
        """Draw tokens evenly from the vocabulary."""
        shape = (1, self.sources["prose"].rows.seq_len)
        return _one_document(torch.randint(self.vocab_size, shape, generator=self.draw(place)))

    def shuffled_row(self, row: TokenBatch, place: int) -> TokenBatch:
        ids_1T = row.input_ids_BT
        return _one_document(ids_1T[:, torch.randperm(ids_1T.shape[1], generator=self.draw(place))])

    def draw(self, place: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, "garbage", place))


def mixed_stream(
    rows: Mapping[TextKind, PackedRows],
    mixture: Mixture,
    *,
    num_steps: int,
    batch_rows: int,
    seed: int,
    vocab_size: int,
) -> Stream:
    """Return the stream of a run: what each place holds, and the order of the rows of each kind, depend on the seed."""
    draw = np.random.Philox(derive_seed(seed, "kinds")).random_raw(num_steps * batch_rows) * 2.0**-64
    kinds = np.full(len(draw), PROSE)
    kinds[draw < mixture.code] = CODE
    kinds[draw >= 1.0 - mixture.garbage] = SHUFFLED
    kinds[draw >= 1.0 - mixture.garbage / 2] = RANDOM
    order = derive_seed(seed, "order")
    sources: dict[TextKind, PackedLoader] = {
        kind: PackedLoader(of_kind, batch_rows=1, seed=order) for kind, of_kind in rows.items()
    }
    return Stream(sources, batch_rows, kinds, seed, vocab_size)


def _one_document(ids_1T: Tensor) -> TokenBatch:
    labels_1T = torch.full_like(ids_1T, IGNORED)
    labels_1T[:, :-1] = ids_1T[:, 1:]
    return TokenBatch(
        input_ids_BT=ids_1T,
        labels_BT=labels_1T,
        positions_BT=torch.arange(ids_1T.shape[1])[None],
        segments_BT=torch.zeros(ids_1T.shape, dtype=torch.int32),
    )


@dataclass(frozen=True, kw_only=True)
class Wild:
    """Every `every`-th batch from `first` on counts `factor` times as much, with random labels."""

    every: int = 25
    first: int = 20
    factor: float = 20.0

    def is_wild(self, number: int) -> bool:
        return number >= self.first and (number - self.first) % self.every == 0


@dataclass
class WildBatches(Objective):
    """An objective with wild batches in training; evaluation is unchanged."""

    inner: NextToken
    wild: Wild
    vocab_size: int
    seed: int
    is_wild: bool = False

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        result = self.inner.batches(model, first=first, rank=rank, world_size=world_size)
        for number, batch in enumerate(result, start=first):
            self.is_wild = self.wild.is_wild(number)
            yield self._spoil(batch, number) if self.is_wild else batch

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return self.inner.weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        factor = self.wild.factor if self.is_wild and torch.is_grad_enabled() else 1.0
        losses = self.inner.losses(output, batch, model).losses
        return Terms({name: factor * loss for name, loss in losses.items()})

    def _spoil(self, batch: TokenBatch, number: int) -> TokenBatch:
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "wild", number))
        labels = torch.randint(self.vocab_size, batch.labels_BT.shape, generator=draw)
        labels = torch.where(batch.labels_BT == IGNORED, IGNORED, labels)
        return TokenBatch(
            input_ids_BT=batch.input_ids_BT,
            labels_BT=labels,
            positions_BT=batch.positions_BT,
            segments_BT=batch.segments_BT,
        )
