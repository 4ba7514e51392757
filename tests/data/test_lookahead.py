"""Batches that are assembled before they are needed: the same ones, errors and threads included."""

import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import parse
from modelwright.data.rows.ahead import LookaheadLoader
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.cache.layout import ColdStore, RowLayout
from modelwright.data.rows.cache.reader import BlockReader, Tiers
from modelwright.data.rows.loader import PackedLoader, PackedRows, PlannedLoader, build_loader, read_index, row_layout
from modelwright.data.rows.order import BatchingConfig
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack

SEQ_LEN, NUM_SEQUENCES, BATCH_ROWS = 64, 900, 12
TENSORS = ("input_ids_BT", "labels_BT", "positions_BT", "segments_BT")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of several pieces with padding, masks and values, of three sources, in files of 32 KiB."""
    folder, rng = tmp_path_factory.mktemp("packed"), np.random.default_rng(0)
    sequences = list[TokenSequence]()
    for number in range(NUM_SEQUENCES):
        length = int(rng.integers(2, SEQ_LEN))
        mask = np.append(rng.integers(0, 2, length - 1), 1)
        sequences.append(
            TokenSequence(rng.integers(2, 10_000, length), mask, "abc"[number % 3], value=float(rng.normal()))
        )
    config = PackConfig(seq_len=SEQ_LEN, shard_bytes=100 * SEQ_LEN * 2, group_by="source")
    pack(sequences, folder, config, vocab_size=10_000, eos_id=1)
    return folder


def reader_of(folder: Path, source: ColdStore | None = None) -> BlockReader:
    layout = RowLayout(folder, read_index(folder), source or ColdStore(str(folder)))
    return BlockReader(Tiers(layout), layout, num_readers=4)


def planned(rows: PackedRows, *, by_tokens: bool) -> PlannedLoader:
    settings = {"mixture": {"weights": {"a": 1, "b": 2, "c": 3}, "update": "heldout_loss"}}
    loader = build_loader(
        rows, parse(BatchingConfig, settings, constants=True), batch_rows=BATCH_ROWS, by_tokens=by_tokens, seed=3,
        num_steps_of=lambda per_epoch: 100, row_losses=lambda: np.zeros(rows.num_rows),
    )  # fmt: skip
    assert isinstance(loader, PlannedLoader)
    return loader


def assert_equal(one: TokenBatch, other: TokenBatch) -> None:
    for name in TENSORS:
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right, err_msg=name)
    assert one.extras.keys() == other.extras.keys() == {"values_BT"}
    np.testing.assert_array_equal(one.extras["values_BT"], other.extras["values_BT"])


def reading_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(("rows", "batches", "tiers"))]


def naive_row(rows: PackedRows, folder: Path, row: int, width: int) -> dict[str, list[Any]]:
    """What a row of a batch has, token by token."""
    offsets = np.fromfile(folder / "offsets.bin", np.int64)
    pieces = range(int(offsets[row]), int(offsets[row + 1]))
    lengths = np.fromfile(folder / "lengths.bin", np.uint32)
    all_values = np.fromfile(folder / "values.bin", np.float32)
    tokens, masks = rows.reader.read(np.array([row]))
    assert masks is not None
    ids, mask = tokens[0].tolist(), masks[0].tolist()
    labels, positions, segments, values = [IGNORED] * width, [0] * width, [-1] * width, [0.0] * width
    at = 0
    for number, piece in enumerate(pieces):
        for place in range(int(lengths[piece])):
            positions[at], segments[at], values[at] = place, number, float(all_values[piece])
            if place and mask[at]:
                labels[at - 1] = ids[at]
            at += 1
    return {
        "input_ids_BT": ids[:width], "labels_BT": labels, "positions_BT": positions, "segments_BT": segments,
        "values_BT": values,
    }  # fmt: skip


@pytest.mark.parametrize("chosen", ["all", "one", "none", "narrow"])
def test_a_batch_is_what_its_rows_have_token_by_token(packed: Path, chosen: str) -> None:
    rows = PackedRows(packed)
    lengths = rows.group_lengths()
    groups = np.random.default_rng(1).permutation(rows.num_groups)
    groups = {"all": groups, "one": groups[:1], "none": groups[:0], "narrow": groups[lengths[groups] < SEQ_LEN]}[chosen]
    width = int(lengths[groups].max()) if chosen == "narrow" else SEQ_LEN
    assert chosen != "narrow" or width < SEQ_LEN
    batch = rows.gather(groups, width)
    expected = [naive_row(rows, packed, int(row), width) for row in groups]
    for name in (*TENSORS, "values_BT"):
        tensor = batch.extras[name] if name in batch.extras else getattr(batch, name)
        assert tensor.shape == (len(groups), width)
        assert tensor.tolist() == [row[name] for row in expected], name


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (2, 3)])
def test_batches_of_a_mixture_that_is_updated_are_the_same(
    packed: Path, by_tokens: bool, rank: int, world_size: int
) -> None:
    """Also where a plan changes right after the next batch was begun, and after going back as a resumed run does."""
    plain, reader = planned(PackedRows(packed), by_tokens=by_tokens), reader_of(packed)
    loader = planned(PackedRows(packed, reader), by_tokens=by_tokens)
    ahead, num_assembled, num_rows = LookaheadLoader(loader, reader, num_ahead=4), 0, 0
    for step, index in enumerate((*range(24), 12, 13, 14, 40, 41, 7)):
        if step == 24:
            for one in (plain, loader):
                one.mixture.load_state_dict(one.mixture.state_dict())
        assembly = ahead._assembly
        batch = ahead.batch(index, rank=rank, world_size=world_size)
        num_assembled += assembly is not None and assembly.is_of(ahead._coming[index])
        num_rows += int((batch.segments_BT[:, 0] >= 0).sum())
        assert_equal(batch, plain.batch(index, rank=rank, world_size=world_size))
        if step < 24 and index % 4 == 3:  # applies to the batch that is assembled by now
            for one in (plain, loader):
                one.mixture.update(index + 1, np.roll([0.7, 0.2, 0.1], index // 4))
    reader.close()
    assert num_assembled >= 15
    assert reader.figures.num_rows == num_rows


def test_the_next_batch_is_assembled_in_the_background_and_counted_when_it_is_asked_for(packed: Path) -> None:
    reader, threads = reader_of(packed), list[str]()
    fetch = reader.fetch

    def recorded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        threads.append(threading.current_thread().name)
        return fetch(rows)

    reader.fetch = recorded
    loader = LookaheadLoader(
        PackedLoader(PackedRows(packed, reader), batch_rows=BATCH_ROWS, seed=1), reader, num_ahead=3
    )
    for index in range(5):
        loader.batch(index)
    assert reader.figures.num_rows == 5 * BATCH_ROWS
    share = loader.share(5)  # as where copies of the documents take their place: read by who asked
    loader.rows.gather(share.groups)
    assert loader._assembly is None
    assert reader.figures.num_rows == 6 * BATCH_ROWS
    reader.close()
    assert threads[0] == threads[-1] == "MainThread"
    assert sum(name.startswith("batches") for name in threads) in (4, 5), "of the one begun last it may be none"
    assert not reading_threads()


def test_nothing_is_assembled_ahead_where_nothing_is_read_ahead(packed: Path) -> None:
    reader = reader_of(packed)
    plain = PackedLoader(PackedRows(packed), batch_rows=BATCH_ROWS, seed=1)
    loader = LookaheadLoader(
        PackedLoader(PackedRows(packed, reader), batch_rows=BATCH_ROWS, seed=1), reader, num_ahead=0
    )
    for index in range(3):
        assert_equal(loader.batch(index), plain.batch(index))
        assert loader._assembly is None
    reader.close()


def test_an_error_of_the_background_reaches_who_asks_for_the_batch(packed: Path, tmp_path: Path) -> None:
    """With its own type and text, at the batch that has the rows and not before."""
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    reader = reader_of(tmp_path)
    (tmp_path / "tokens-00001.bin").write_bytes(bytes((packed / "tokens-00001.bin").stat().st_size))
    rows = PackedRows(tmp_path, reader)
    loader = PackedLoader(rows, batch_rows=1, seed=1)
    first_rows = [file["rows"] for file in read_index(tmp_path)["files"]]
    is_damaged = [first_rows[0] <= int(loader.share(index).groups[0]) < sum(first_rows[:2]) for index in range(200)]
    failing = is_damaged.index(True, is_damaged.index(False))
    ahead = LookaheadLoader(loader, reader, num_ahead=4)
    first = is_damaged.index(False)
    for index in range(first, failing):
        ahead.batch(index)
    assert ahead._assembly is not None
    with pytest.raises(ArtifactError, match=r"of tokens-00001.bin are damaged: their CRC-32 differs"):
        ahead.batch(failing)
    following = is_damaged.index(False, failing)
    assert_equal(ahead.batch(following), PackedLoader(PackedRows(packed), batch_rows=1, seed=1).batch(following))
    reader.close()
    assert not reading_threads()


def test_closing_ends_a_batch_whose_rows_will_not_be_read(packed: Path) -> None:
    """One reading thread is in the midst of a read; the read that the next batch needs besides has not begun."""
    begun, release, layout = threading.Event(), threading.Event(), row_layout(packed)
    plan = PackedLoader(PackedRows(packed), batch_rows=2, seed=1)
    blocks = [{layout.block_of(int(row))[0] for row in plan.share(index).groups} for index in range(200)]
    first = next(i for i in range(199) if len(blocks[i]) == 1 and len(blocks[i + 1] - blocks[i]) == 2)
    at_once = {part.file for block in blocks[first] for part in layout.parts(block)}

    class BlockedSource(ColdStore):
        def read(self, name: str, offset: int, num_bytes: int) -> bytes:
            if name not in at_once:
                begun.set()
                assert release.wait(30)
            return super().read(name, offset, num_bytes)

    blocked = RowLayout(packed, read_index(packed), BlockedSource(str(packed)))
    reader = BlockReader(Tiers(blocked), blocked, num_readers=1)
    loader = LookaheadLoader(PackedLoader(PackedRows(packed, reader), batch_rows=2, seed=1), reader, num_ahead=1)
    loader.batch(first)
    assembly = loader._assembly
    assert assembly is not None
    assembly.expected.result(10)
    assert begun.wait(10)
    closing = threading.Thread(target=reader.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive(), "a read that has begun is waited for"
    release.set()
    closing.join(10)
    assert not closing.is_alive()
    assert not reading_threads()
    with pytest.raises(CancelledError):
        assembly.batch.result(0)
