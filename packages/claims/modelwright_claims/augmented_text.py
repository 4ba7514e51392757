"""Batches of a small text whose documents change while a model trains on them, as by the section `augmentation` of a
run: the product's copies (`data/rows/ahead.py`) and its rule for their strength.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from modelwright.core.seeds import derive_seed
from modelwright.data.augment.augmenter import CopyRecipe
from modelwright.data.document import Document
from modelwright.data.rows.ahead import AugmentedLoader
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.origins import Origin
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.pipeline.augmenting import MethodBuilder
from modelwright.pipeline.stages.rows import TextEncoder
from modelwright.train.technique import TechniqueBuilder
from modelwright.train.techniques.augmentation_strength import AugmentationStrengthConfig, augmentation_strength
from modelwright_claims.claim import Setting
from modelwright_claims.workbench import TOKENIZER, TRAIN_TEXTS


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Documents of a run that are changed. methods: names, of which each document gets one."""

    methods: tuple[str, ...]
    probability: float = 0.3
    """That a document is changed while the loss is between the thresholds; 0 changes none."""
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
    rows = rows_with_documents(setting, seq_len)
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


def rows_with_documents(setting: Setting, seq_len: int) -> PackedRows:
    """The training text of `workbench.store_text`, packed once, with its documents beside the rows."""
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
    return PackedRows(folder)
