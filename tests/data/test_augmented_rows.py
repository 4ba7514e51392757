"""Augmentation while a model trains: the same batches after a resume on any number of ranks, with mixture, curriculum
and augmentation on; rows against a naive twin; workers that are killed.
"""

import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from global_batches import rows_read
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import parse
from modelwright.data.augment.augmenter import Augmenter, CopyRecipe
from modelwright.data.document import Document
from modelwright.data.rows.ahead import AHEAD, AugmentedLoader
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows, PlannedLoader, build_loader
from modelwright.data.rows.order import BatchingConfig
from modelwright.data.rows.pack import Origin, PackConfig, RowOrigins, TokenSequence, pack
from modelwright.pipeline.stage import AugmentationConfig
from modelwright.train.technique import Technique, Update
from modelwright.train.techniques.augmentation_strength import AugmentationStrengthConfig, augmentation_strength
from refusals import config_error
from reversed_copies import Words, encode, methods

SEQ_LEN, BATCH_ROWS, EOS, STEPS = 48, 8, 1, 60
FOLLOWING = AugmentationStrengthConfig(probability=0.5, relative=True, high_loss=0.9, low_loss=0.5, window=5)
PLAN: dict[str, Any] = {
    "curriculum": {"by": "length", "fraction": 0.4},
    "mixture": {"weights": {"a": 1, "b": 2, "c": 3}, "update": "heldout_loss"},
}


def documents(count: int, *, longest: int) -> Iterator[Document]:
    rng = np.random.default_rng(0)
    for number in range(count):
        words = [str(number), *map(str, rng.integers(0, 500, rng.integers(2, longest)))]
        yield Document(id=f"d{number}", text=" ".join(words), kind="prose", split="train", source="abc"[number % 3])


def packed(folder: Path, many: Sequence[Document], **settings: Any) -> PackedRows:
    config = PackConfig(seq_len=SEQ_LEN, **settings)
    sequences = (
        TokenSequence(sequence.ids, sequence.mask, document.source, origin=Origin(document, part))
        for document in many
        for part, sequence in enumerate(encode(document))
    )
    pack(sequences, folder, config, vocab_size=2000, eos_id=EOS)
    return PackedRows(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PackedRows:
    return packed(tmp_path_factory.mktemp("rows"), list(documents(500, longest=40)), mode="one_per_row")


def recipe(rows: PackedRows) -> CopyRecipe:
    return CopyRecipe(folder=rows.folder, seq_len=SEQ_LEN, eos_id=EOS, seed=5, encoder=Words(), methods=methods)


def planned(rows: PackedRows, *, by_tokens: bool) -> PlannedLoader:
    loader = build_loader(
        rows, parse(BatchingConfig, PLAN, constants=True), batch_rows=BATCH_ROWS, by_tokens=by_tokens, seed=3,
        num_steps_of=lambda per_epoch: STEPS, row_losses=lambda: np.zeros(rows.num_rows),
    )  # fmt: skip
    assert isinstance(loader, PlannedLoader)
    return loader


class Rank:
    """The data of one rank of a training whose losses are known."""

    def __init__(self, rows: PackedRows, rank: int, world_size: int, *, by_tokens: bool, num_workers: int = 0) -> None:
        self.place = {"rank": rank, "world_size": world_size}
        self.plan = planned(rows, by_tokens=by_tokens)
        self.loader = AugmentedLoader(self.plan, recipe(rows), num_workers=num_workers)
        self.on_exit = ExitStack()
        self.technique = strength_technique(self.loader, self.on_exit)
        assert self.technique.state is not None
        self.strength = self.technique.state

    def step(self, step: int) -> TokenBatch:
        batch = self.loader.batch(step, **self.place)
        self.technique.on_gradients(update_of(step))
        if step % 10 == 9:
            self.plan.mixture.update(step + 1, np.roll([0.5, 0.2, 0.3], step // 10))
        return batch

    def state(self) -> dict[str, Any]:
        return {"strength": self.strength.state_dict(), "mixture": self.plan.mixture.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.strength.load_state_dict(state["strength"])
        self.plan.mixture.load_state_dict(state["mixture"])


def strength_technique(loader: AugmentedLoader, on_exit: ExitStack) -> Technique:
    runtime: Any = SimpleNamespace(on_exit=on_exit)
    return augmentation_strength(FOLLOWING, loader, runtime)


def update_of(step: int) -> Update:
    """A loss that falls through both thresholds, with an interruption."""
    loss = math.nan if step == 7 else 4.0 * math.exp(-step / 20)
    return Update(step=step, num_steps=STEPS, gradients=[], losses={"loss": loss}, weights={"loss": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("by_tokens", [False, True], ids=["whole_rows", "token_budget"])
def test_the_same_batches_after_a_resume_on_any_number_of_ranks(rows: PackedRows, by_tokens: bool) -> None:
    whole = Rank(rows, 0, 1, by_tokens=by_tokens)
    states, batches = [], []
    for step in range(STEPS):
        states.append(whole.state())
        batches.append(rows_read([whole.step(step)], by_tokens=by_tokens))
    strengths = {state["strength"]["planned"][0] for state in states}
    assert strengths == {0.75, 0.5, 0.35}, "the loss crosses both thresholds"
    plain = planned(rows, by_tokens=by_tokens)
    changed = [batches[step] != rows_read([plain.batch(step)], by_tokens=by_tokens) for step in range(10)]
    assert sum(changed) >= 8
    for seed, world_size in enumerate((1, 2, 4)):
        first = int(np.random.default_rng(seed).integers(5, STEPS - 20))
        ranks = [Rank(rows, rank, world_size, by_tokens=by_tokens) for rank in range(world_size)]
        for rank in ranks:
            rank.load(states[first])
        for step in range(first, STEPS):
            shares = [rank.step(step) for rank in ranks]
            assert rows_read(shares, by_tokens=by_tokens) == batches[step], f"step {step} on {world_size} ranks"


def test_workers_make_the_same_batches_ahead_and_a_killed_one_is_replaced(rows: PackedRows) -> None:
    here = Rank(rows, 0, 1, by_tokens=False)
    with (ahead := Rank(rows, 0, 1, by_tokens=False, num_workers=1)).on_exit:
        for step in range(24):
            if step == 12:
                pool = ahead.loader.workers._pool
                assert pool is not None
                for pid in list(pool._processes):
                    os.kill(pid, signal.SIGKILL)
            expected, batch = here.step(step), ahead.step(step)
            assert torch.equal(batch.input_ids_BT, expected.input_ids_BT)
            assert torch.equal(batch.labels_BT, expected.labels_BT)
        begun = sorted(ahead.loader.workers._jobs)
        assert begun == list(range(24, 24 + AHEAD))
        assert ahead.loader.cost.num_copies == here.loader.cost.num_copies > 0
    assert not ahead.loader.workers._jobs, "closed at the end of the run"


def naive_row(pieces: Sequence[tuple[list[int], list[bool]]]) -> tuple[list[int], list[int], list[int], list[int]]:
    tokens, labels, positions, segments = [EOS] * SEQ_LEN, [IGNORED] * SEQ_LEN, [0] * SEQ_LEN, [-1] * SEQ_LEN
    at = 0
    for number, (ids, targets) in enumerate(pieces):
        for place, token in enumerate(ids):
            tokens[at], positions[at], segments[at] = token, place, number
            if place + 1 < len(ids) and targets[place + 1]:
                labels[at] = ids[place + 1]
            at += 1
    return tokens, labels, positions, segments


def naive_pieces(
    rows: PackedRows, row: int, many: Sequence[Document], epoch: int
) -> list[tuple[list[int], list[bool]]]:
    """The pieces of a row of whole documents, each found by its first word, with the copy where it fits."""
    batch = rows.gather(np.array([row]))
    segments = batch.segments_BT[0].numpy()
    spare, pieces = int((segments < 0).sum()), []
    for number in range(int(segments.max()) + 1):
        original = batch.input_ids_BT[0].numpy()[segments == number].tolist()
        document = many[original[0] - 2]
        (copy,) = Augmenter(methods(), seed=5)([document], epoch=epoch, strength=0.6)
        chosen = document if copy is None else copy
        (ids, mask, *_), old = encode(chosen)[0], len(original)
        ids = list(ids) + ([] if mask else [EOS])
        if mask and len(ids) > old + spare:
            chosen, (ids, mask, *_) = document, encode(document)[0]
        ids = list(ids)[: old + spare]
        spare += old - len(ids)
        targets = [bool(one) for one in (mask or [1] * len(ids))][: len(ids)]
        pieces.append((ids, targets))
    return pieces


def test_rows_equal_those_of_a_naive_twin(tmp_path: Path) -> None:
    many = [
        Document(
            id=f"d{number}", text=one.text, kind="qa", split="train", source="",
            meta={"question": one.text, "answer": ""},
        ) if number % 4 == 0 and len(one.text.split()) > 6 else one
        for number, one in enumerate(documents(120, longest=30))
    ]  # fmt: skip
    many = [Document(**{**vars(one), "source": ""}) for one in many]
    rows = packed(tmp_path, many)
    loader = AugmentedLoader(PackedLoader(rows, batch_rows=BATCH_ROWS, seed=1), recipe(rows), num_workers=0)
    for index in range(12):
        loader.set_strength(index, 0.6)
        batch, share = loader.batch(index), loader.loader.share(index)
        for place, (row, epoch) in enumerate(zip(share.groups.tolist(), share.epochs.tolist(), strict=True)):
            expected = naive_row(naive_pieces(rows, row, many, epoch))
            parts = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT)
            for part, values in zip(parts, expected, strict=True):
                assert part[place].tolist() == values
    assert share.epochs.max() >= 1
    assert loader.cost.methods["reversed_words"].num_changed > 50


@pytest.mark.parametrize("long_documents", ["split", "chunk"])
def test_copies_of_long_documents_are_cut_where_the_originals_are(tmp_path: Path, long_documents: Any) -> None:
    many = list(documents(40, longest=200))
    settings = {"chunk_overlap": 8, "min_chunk_tokens": 16} if long_documents == "chunk" else {}
    rows = packed(tmp_path, many, long_documents=long_documents, **settings)
    loader = AugmentedLoader(PackedLoader(rows, batch_rows=1, seed=1), recipe(rows), num_workers=0)
    copies = {
        one.id: [*encode(copy)[0].ids, EOS]
        for one, copy in zip(many, Augmenter(methods(), seed=5)(many, epoch=0, strength=1.0), strict=True)
        if copy is not None
    }
    read: dict[str, list[tuple[int, int, list[int]]]] = {}
    origins = RowOrigins.open(rows.folder)
    for index in range(rows.num_rows):
        loader.set_strength(index, 1.0)
        batch, (row,) = loader.batch(index), loader.loader.share(index).groups.tolist()
        for number, origin in enumerate(origins.of_row(row)):
            ids = batch.input_ids_BT[0][batch.segments_BT[0] == number].tolist()
            name, num_known = origins.document(origin.document).id, max(1, origin.num_repeated)
            read.setdefault(name, []).append((origin.first, num_known, ids))
    assert len(copies) == len(many)
    for name, pieces in read.items():
        whole = copies[name]
        for first, num_known, ids in pieces:
            if first + num_known < len(whole):  # else the copy says nothing new there, and the original stays
                assert ids == whole[first : first + len(ids)]
        covered = {place for first, _, ids in pieces for place in range(first, first + len(ids))}
        lost = len(whole) - len(covered & set(range(len(whole))))
        assert lost <= 6, "only what exceeds the row of a text that became longer"


def test_rows_without_documents_and_wrong_settings_are_refused(tmp_path: Path) -> None:
    pack([TokenSequence([2, 3, 4])], tmp_path, PackConfig(seq_len=SEQ_LEN), vocab_size=9, eos_id=EOS)
    loader = AugmentedLoader(
        PackedLoader(PackedRows(tmp_path), batch_rows=1, seed=0), recipe(PackedRows(tmp_path)), num_workers=0
    )
    loader.set_strength(0, 1.0)
    with pytest.raises(ArtifactError, match="run the pack stage again"):
        loader.batch(0)
    with config_error("methods", match="methods: 'random_swop' is unknown; did you mean 'random_swap'"):
        parse(AugmentationConfig, {"methods": ["random_swop"]})
    with config_error("settings"):
        parse(AugmentationConfig, {"settings": {"swap": {}}})
