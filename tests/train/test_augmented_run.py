"""Training processes whose batches have a mixture, a curriculum and augmentation in worker processes of their own: the
same batches, to the token, after a stop at a random step and with another number of processes.
"""

import multiprocessing
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch

from distributed import run_distributed
from global_batches import rows_read
from modelwright.core.config import Stopped, parse
from modelwright.core.records import column, read_records
from modelwright.data.augment.augmenter import CopyRecipe
from modelwright.data.document import Document
from modelwright.data.rows.ahead import AHEAD, AugmentedLoader
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedRows, PlannedLoader, build_loader
from modelwright.data.rows.order import BatchingConfig
from modelwright.data.rows.pack import Origin, PackConfig, TokenSequence, pack
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import World
from modelwright.train.techniques.augmentation_strength import AugmentationStrengthConfig, augmentation_strength
from modelwright.train.techniques.heldout_mixture import heldout_mixture
from reversed_copies import Words, encode, methods

NUM_STEPS, EVERY, EOS = 24, 3, 1
BATCHING = {
    "curriculum": {"by": "length"},
    "mixture": {"weights": {"even": 1, "noise": 1}, "update": "heldout_loss"},
}
STRENGTH = AugmentationStrengthConfig(probability=0.5, relative=True, high_loss=0.9, low_loss=0.5, window=3)
STOPPED_AFTER = random.Random(44).randint(AHEAD + 2, NUM_STEPS - 3)

Batches = dict[int, TokenBatch]
"""What one process read, by the number of the batch."""


def packed(folder: Path) -> PackedRows:
    """Two sources, one of which cannot be learned, with their documents."""
    draw, sequences = np.random.default_rng(0), []
    for number in range(400):
        length = int(draw.integers(3, tiny_run.LENGTH - 2))
        words = draw.integers(0, tiny_run.VOCABULARY - 2, length) if number % 2 else np.full(length, number % 5)
        source = "noise" if number % 2 else "even"
        text = " ".join(map(str, words))
        document = Document(id=f"d{number}", text=text, kind="prose", split="train", source=source)
        (sequence,) = encode(document)
        sequences.append(TokenSequence(sequence.ids, None, source, origin=Origin(document, 0)))
    config = PackConfig(seq_len=tiny_run.LENGTH, mode="length_buckets")
    pack(sequences, folder, config, vocab_size=tiny_run.VOCABULARY, eos_id=EOS)
    return PackedRows(folder)


def run(folder: Path, rows: Path, *, world: World | None = None, stop_after: int = 0, num_workers: int = 0) -> Batches:
    """Train, or resume; returns the batches that this process read."""
    data, batching = PackedRows(rows), parse(BatchingConfig, BATCHING)
    plan = build_loader(
        data, batching, batch_rows=tiny_run.ROWS, by_tokens=True, seed=5, num_steps_of=lambda per_epoch: NUM_STEPS,
        row_losses=lambda: np.zeros(0),
    )  # fmt: skip
    assert isinstance(plan, PlannedLoader)
    recipe = CopyRecipe(
        folder=data.folder, seq_len=data.seq_len, eos_id=data.eos_id, seed=7, encoder=Words(), methods=methods
    )
    loader = AugmentedLoader(plan, recipe, num_workers=num_workers)
    read, batch_of = Batches(), loader.batch

    def batch(index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        read[index] = batch_of(index, rank=rank, world_size=world_size)
        assert (loader.workers._pool is not None) == bool(num_workers)
        return read[index]

    loader.batch = batch  # type: ignore[method-assign]
    objective = NextToken(loader)
    heldout = {name: [data.gather(data.source_groups(name)[:8])] for name in data.sources}
    techniques = [
        *(tiny_run.watching(stop=tiny_run.StopAfter(stop_after)) if stop_after else []),
        partial(
            heldout_mixture, batching.mixture, mixture=plan.mixture, objective=objective, heldout=heldout, every=EVERY
        ),
        partial(augmentation_strength, STRENGTH, loader),
    ]
    config = tiny_run.settings(num_steps=NUM_STEPS, checkpoint_every_steps=1, keep_last=1)
    with suppress(Stopped):
        tiny_run.run(
            folder, config, objective=objective, world=world, techniques=techniques,
            heldout=[data.gather(np.arange(8))],
        )  # fmt: skip
    return read


def run_on_rank(world: World, folder: Path, rows: Path, stop_after: int) -> Batches:
    # ranks of these tests are daemons, which Python lets have no processes of their own; other ranks are not
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore[reportAttributeAccessIssue]
    read = run(folder, rows, world=world, stop_after=stop_after, num_workers=1)
    for worker in multiprocessing.active_children():
        worker.join()  # a process of `multiprocessing` closes its queues at once when it ends, and a worker would wait
    return read


def together(ranks: Sequence[Batches]) -> dict[int, list[tuple]]:
    """The rows of each global batch that all ranks read: a rank may be ahead of another when they stop."""
    common = set(ranks[0]).intersection(*ranks)
    return {index: rows_read([rank[index] for rank in ranks], by_tokens=True) for index in sorted(common)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("rows")).folder


@pytest.fixture(scope="module")
def whole(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[tuple]]]:
    """The folder of an undisturbed run of one process, and its batches."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    return folder, together([run(folder, rows)])


@pytest.fixture(scope="module")
def stopped(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[tuple]]]:
    """The folder of a run of two processes that was stopped, and its batches."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder, together(run_distributed(run_on_rank, 2, folder, rows, STOPPED_AFTER))


def test_the_run_has_what_it_is_to_be_tested_with(whole: tuple[Path, dict[int, list[tuple]]], rows: Path) -> None:
    folder, batches = whole
    records = read_records(folder / "metrics.jsonl")
    strengths = [value for _, value in column(records, "augmentation_strength")]
    assert len(set(strengths)) > 1
    assert sum(value for _, value in column(records, "augmented_pieces")) > 50
    lengths = [max(len(row[0]) for row in batches[index]) for index in range(NUM_STEPS)]
    assert max(lengths[:3]) < max(lengths[-3:]), "the curriculum begins with short rows"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_stopped_run_goes_on_with_the_same_batches(
    whole: tuple[Path, dict[int, list[tuple]]], stopped: tuple[Path, dict[int, list[tuple]]], rows: Path,
    tmp_path: Path, world_size: int,
) -> None:  # fmt: skip
    _, expected = whole
    folder, before = stopped
    shutil.copytree(folder, tmp_path / "run")
    after = together(run_distributed(run_on_rank, world_size, tmp_path / "run", rows, 0))
    first = min(after)
    assert STOPPED_AFTER <= first <= STOPPED_AFTER + 1, "the processes agree on the stop within a step"
    assert [before[index] for index in range(first)] == [expected[index] for index in range(first)]
    assert [after[index] for index in range(first, NUM_STEPS)] == [expected[index] for index in range(first, NUM_STEPS)]
