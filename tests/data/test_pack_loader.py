"""Packing and loading: nothing lost, nothing leaked, the same batches for any number of ranks."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import DataError
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.data.rows.pack import PackConfig, best_fit, pack, pieces
from refusals import config_error

EOS = 1


def naive_best_fit(lengths: np.ndarray, capacity: int) -> list[int]:
    """Space that is left in each row after one-by-one best fit, sorted."""
    space: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row, left in enumerate(space) if left >= length]
        if not fitting:
            space.append(capacity)
            fitting = [len(space) - 1]
        space[min(fitting, key=lambda row: space[row])] -= length
    return sorted(space)


def random_sequences(seed: int, count: int = 60, longest: int = 90, masked: bool = False):
    rng = np.random.default_rng(seed)
    number = 2
    for _ in range(count):
        ids = np.arange(number, number + rng.integers(1, longest))  # every token is unique
        number += len(ids)
        yield ids, (rng.random(len(ids)) < 0.4).astype(np.uint8) if masked else None


@pytest.mark.parametrize("seed", range(6))
def test_best_fit_equals_the_naive_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(8, 70))
    lengths = rng.integers(2, capacity + 1, size=300)
    rows = best_fit(lengths, capacity)
    used = np.bincount(rows, weights=lengths)
    assert used.max() <= capacity
    assert sorted((capacity - used).astype(int).tolist()) == naive_best_fit(lengths, capacity)


def test_best_fit_takes_time_in_proportion_and_fills_rows() -> None:
    def lengths(count: int) -> np.ndarray:
        return np.clip(np.random.default_rng(0).lognormal(5, 1, count).astype(np.int64), 2, 1024)

    def seconds(count: int) -> float:
        """CPU time of this process; the least of three, since other work on the machine only adds to it."""
        starts, given = [time.process_time()], lengths(count)
        for _ in range(3):
            best_fit(given, 1024)
            starts.append(time.process_time())
        return min(end - start for start, end in pairwise(starts))

    assert seconds(200_000) < 40 * seconds(10_000)
    rows = best_fit(lengths(200_000), 1024)
    assert lengths(200_000).sum() / ((rows.max() + 1) * 1024) > 0.999


@pytest.mark.parametrize(("length", "seq_len", "expected"), [
    (2, 8, [(0, 2)]), (8, 8, [(0, 8)]), (9, 8, [(0, 8), (7, 9)]), (15, 8, [(0, 8), (7, 15)]), (1, 8, []),
])  # fmt: skip
def test_pieces_overlap_by_one(length: int, seq_len: int, expected: list[tuple[int, int]]) -> None:
    assert list(pieces(length, seq_len)) == expected


@pytest.mark.parametrize("mode", ["best_fit", "one_per_row"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_target_is_predicted_once_from_its_own_document(tmp_path: Path, mode, masked: bool, seed: int) -> None:
    sequences = list(random_sequences(seed, masked=masked))
    vocab_size = sum(len(ids) for ids, _ in sequences) + 2
    config = PackConfig(seq_len=32, mode=mode, shard_bytes=32 * 2 * 7)
    report = pack(sequences, tmp_path, config, vocab_size=vocab_size, eos_id=EOS)

    expected: Counter[tuple[int, int]] = Counter()
    for ids, mask in sequences:
        whole = ids.tolist() if masked else [*ids.tolist(), EOS]
        counted = [1] * len(whole) if mask is None else mask.tolist()
        expected.update((a, b) for a, b, c in zip(whole, whole[1:], counted[1:], strict=False) if c)

    found: Counter[tuple[int, int]] = Counter()
    rows = PackedRows(tmp_path)
    assert len(list(tmp_path.glob("tokens-*.bin"))) > 1
    for batch in rows.batches(5):
        counted = batch.labels_BT != IGNORED
        found.update(zip(batch.input_ids_BT[counted].tolist(), batch.labels_BT[counted].tolist(), strict=True))
        assert (batch.segments_BT[counted] >= 0).all()
        starts = batch.positions_BT == 0
        changed = batch.segments_BT[:, 1:] != batch.segments_BT[:, :-1]
        real = batch.segments_BT[:, 1:] >= 0
        assert (starts[:, 1:][real] == changed[real]).all()
    assert found == expected
    assert report.num_targets == sum(expected.values()) == rows.num_targets
    assert not list(tmp_path.glob("*.tmp"))


def test_end_token_is_not_doubled(tmp_path: Path) -> None:
    pack([([5, 6, EOS], None), ([7, 8], None)], tmp_path, PackConfig(seq_len=6), vocab_size=10, eos_id=EOS)
    (batch,) = PackedRows(tmp_path).batches(4)
    assert batch.input_ids_BT.tolist() == [[5, 6, EOS, 7, 8, EOS]]
    assert batch.labels_BT.tolist() == [[6, EOS, IGNORED, 8, EOS, IGNORED]]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    sequences = [(range(2, 40), None), ([], None), ([3, 4, EOS], [0, 0, 0]), ([3, 4, EOS], [0, 1, 1])]
    config = PackConfig(seq_len=16, long_documents="skip")
    report = pack(sequences, tmp_path, config, vocab_size=50, eos_id=EOS)
    assert report.skipped == {"longer than a row": 1, "empty": 1, "piece without a target": 1}
    assert report.num_targets == 2


def test_wide_vocabulary(tmp_path: Path) -> None:
    pack([([70_000, 100_000], None)], tmp_path, PackConfig(seq_len=4), vocab_size=128_000, eos_id=EOS)
    (batch,) = PackedRows(tmp_path).batches(1)
    assert batch.input_ids_BT.tolist() == [[70_000, 100_000, EOS, EOS]]
    assert batch.segments_BT.tolist() == [[0, 0, 0, -1]]


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to pack; no document"):
        pack([], tmp_path, PackConfig(), vocab_size=10, eos_id=EOS)
    with pytest.raises(DataError, match="all 1 sequences were left out"):
        pack([([], None)], tmp_path, PackConfig(), vocab_size=10, eos_id=EOS)
    with pytest.raises(DataError, match="sequence 0: a token id lies outside the vocabulary of 10"):
        pack([([10], None)], tmp_path, PackConfig(), vocab_size=10, eos_id=EOS)
    with config_error("seq_len"):
        PackConfig(seq_len=1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match="packed rows are missing"):
        PackedRows(tmp_path)


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    pack(random_sequences(0), tmp_path, PackConfig(seq_len=32), vocab_size=10_000, eos_id=EOS)
    index = json.loads((tmp_path / "index.json").read_text())
    with open(tmp_path / "tokens-00000.bin", "r+b") as file:
        file.truncate(10)
    with pytest.raises(ArtifactError, match=r"tokens-00000\.bin: is missing or truncated"):
        PackedRows(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps(index | {"format": "other/9"}))
    with pytest.raises(ArtifactError, match="format 'other/9'"):
        PackedRows(tmp_path)


@pytest.fixture
def rows(tmp_path: Path) -> PackedRows:
    pack(random_sequences(7, count=80), tmp_path, PackConfig(seq_len=32), vocab_size=10_000, eos_id=EOS)
    return PackedRows(tmp_path)


def test_any_number_of_ranks_gives_the_same_global_batch(rows: PackedRows) -> None:
    loader = PackedLoader(rows, batch_rows=8, seed=3)
    for index in (0, 5, 31):
        whole = loader.batch(index)
        for world_size in (1, 2, 4, 8):
            shares = [loader.batch(index, rank=rank, world_size=world_size) for rank in range(world_size)]
            for name in ("input_ids_BT", "labels_BT", "positions_BT", "segments_BT"):
                joined = np.concatenate([getattr(share, name).numpy() for share in shares])
                assert (joined == getattr(whole, name).numpy()).all()
    with config_error("batch_rows"):
        loader.batch(0, world_size=3)


def test_resume_needs_only_the_batch_number(rows: PackedRows) -> None:
    loader = PackedLoader(rows, batch_rows=8, seed=3)
    first = [loader.batch(i).input_ids_BT for i in range(20)]
    again = PackedLoader(PackedRows(rows.folder), batch_rows=8, seed=3)
    for i in (19, 4, 11):
        assert (again.batch(i).input_ids_BT == first[i]).all()


def test_every_epoch_is_a_new_permutation(rows: PackedRows) -> None:
    loader = PackedLoader(rows, batch_rows=8, seed=3)
    epochs = [loader.order(e * rows.num_rows, (e + 1) * rows.num_rows) for e in range(3)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(rows.num_rows))
    assert epochs[0].tolist() != epochs[1].tolist() != epochs[2].tolist()
    assert loader.order(0, 9).tolist() != PackedLoader(rows, batch_rows=8, seed=4).order(0, 9).tolist()


def test_tiny_data_wraps(tmp_path: Path) -> None:
    pack([([2, 3], None)], tmp_path, PackConfig(seq_len=4), vocab_size=5, eos_id=EOS)
    loader = PackedLoader(PackedRows(tmp_path), batch_rows=6, seed=0)
    assert loader.num_batches_per_epoch == 1
    assert loader.batch(3).input_ids_BT.tolist() == [[2, 3, EOS, EOS]] * 6


def test_order_is_the_same_in_another_process(rows: PackedRows) -> None:
    code = (
        "import sys, pathlib; from modelwright.data.rows.loader import *;"
        "print(PackedLoader(PackedRows(pathlib.Path(sys.argv[1])), batch_rows=8, seed=3).order(0, 50).tolist())"
    )
    run = [sys.executable, "-c", code, str(rows.folder)]
    output = subprocess.run(run, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True)
    assert json.loads(output.stdout) == PackedLoader(rows, batch_rows=8, seed=3).order(0, 50).tolist()
