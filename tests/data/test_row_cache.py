"""The cache of packed rows: the same rows as from memory-mapped files, budgets, checksums, tiers, kills."""

import fcntl
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from modelwright.core.artifacts import ArtifactError, StorageError
from modelwright.core.config import ConfigError
from modelwright.data.rows.ahead import LookaheadLoader
from modelwright.data.rows.cache import row_cache
from modelwright.data.rows.cache.layout import BLOCK_BYTES, NUM_TRIES, ColdStore, RowLayout, damaged
from modelwright.data.rows.cache.reader import DISK, MEMORY, SOURCE, BlockReader, Tiers
from modelwright.data.rows.cache.row_cache import RowCacheConfig, open_cache, remove_leftovers
from modelwright.data.rows.loader import PackedLoader, PackedRows, read_index, row_layout
from modelwright.data.rows.pack import PackConfig, pack
from rank_processes import fork_context
from refusals import config_error

SEQ_LEN, NUM_ROWS = 512, 1500
ROW_BYTES = 3 * SEQ_LEN
"""uint16 tokens and a mask."""
NUM_BLOCKS = 6 * 4
"""Six files of 250 rows; 64 rows fill a block."""
BATCH_ROWS = 12


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    rng = np.random.default_rng(0)
    sequences = [
        (rng.integers(2, 60_000, SEQ_LEN), np.append(rng.integers(0, 2, SEQ_LEN - 1), 1)) for _ in range(NUM_ROWS)
    ]
    config = PackConfig(seq_len=SEQ_LEN, shard_bytes=250 * SEQ_LEN * 2)
    pack(sequences, folder, config, vocab_size=60_000, eos_id=1)
    return folder


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test alone in place of that in memory."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(row_cache, "memory_folder", lambda: folder)
    return folder


def settings(tmp_path: Path, **changes: Any) -> RowCacheConfig:
    values: dict[str, Any] = {"enabled": True, "folder": str(tmp_path / "disk"), "num_readers": 4}
    return RowCacheConfig(**{**values, **changes})


def equal(one: Any, other: Any) -> bool:
    names = ("input_ids_BT", "labels_BT", "positions_BT", "segments_BT")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def disk_usage(folder: Path) -> int:
    """Bytes that the files of a folder take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_are_those_of_memory_mapped_rows(packed: Path, tmp_path: Path, memory: Path, world_size: int) -> None:
    plain = PackedLoader(PackedRows(packed), batch_rows=BATCH_ROWS, seed=3)
    budget = 8 * BLOCK_BYTES
    config = settings(tmp_path, memory_bytes=budget, disk_bytes=budget)
    with open_cache(config, row_layout(packed)) as (reader,):
        loader = PackedLoader(PackedRows(packed, reader), batch_rows=BATCH_ROWS, seed=3)
        ahead = LookaheadLoader(loader, reader, num_ahead=4)
        for number in (*range(40), 7, 130, 131):
            expected = plain.batch(number, rank=world_size - 1, world_size=world_size)
            assert equal(ahead.batch(number, rank=world_size - 1, world_size=world_size), expected)
            assert disk_usage(memory) <= budget + 2 * 4096  # whole pages
            assert disk_usage(tmp_path / "disk") <= budget + 2 * 4096
        figures = reader.tiers.figures.blocks
    assert min(figures.values()) > 0, figures
    assert not list(memory.iterdir())
    assert not list((tmp_path / "disk").iterdir())


def test_every_block_is_the_bytes_of_its_files(packed: Path) -> None:
    layout = row_layout(packed)
    assert layout.num_blocks == NUM_BLOCKS
    assert layout.total_bytes == sum(path.stat().st_size for path in packed.glob("*-0*.bin"))
    for block in range(layout.num_blocks):
        parts = layout.parts(block)
        content = b"".join(
            (packed / part.file).read_bytes()[part.offset : part.offset + part.num_bytes] for part in parts
        )
        assert len(content) == layout.num_bytes_of(block)
        assert damaged(layout, block, content) is None
        for at in (0, len(content) // 2, len(content) - 1):
            flipped = bytearray(content)
            flipped[at] ^= 1
            assert damaged(layout, block, bytes(flipped)) == parts[at >= parts[0].num_bytes]


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_byte_at_the_source_is_named(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in packed.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip(copy / "mask-00002.bin", 70 * SEQ_LEN + 9)
    with open_cache(settings(tmp_path), row_layout(copy)) as (reader,):
        rows = PackedRows(copy, reader)
        rows.gather(np.arange(500, 564))
        with pytest.raises(ArtifactError, match=r"bytes 32,768 to 65,536 of mask-00002.bin are damaged"):
            rows.gather(np.arange(564, 565))
    (copy / "mask-00002.bin").unlink()
    with (
        open_cache(settings(tmp_path), row_layout(copy)) as (reader,),
        pytest.raises(ArtifactError, match=r"mask-00002.bin: is missing"),
    ):
        PackedRows(copy, reader).gather(np.array([600]))


@pytest.mark.parametrize("tier", [MEMORY, DISK])
def test_a_flipped_byte_in_a_tier_is_named_and_read_again(
    packed: Path, tmp_path: Path, memory: Path, tier: str
) -> None:
    notes: list[str] = []
    memory_bytes = 2**20 if tier == MEMORY else 110_000
    config = settings(tmp_path, memory_bytes=memory_bytes, disk_bytes=2**23)
    mapped = PackedRows(packed)
    with open_cache(config, row_layout(packed), note=notes.append) as (reader,):
        rows = PackedRows(packed, reader)
        rows.gather(np.arange(0, 128, 8))  # block 0 in memory if it has room for one, block 1 where the next is
        reader.tiers.flush()
        block = 0 if tier == MEMORY else int(reader.tiers.places()[DISK][0])
        (slots,) = (memory if tier == MEMORY else tmp_path / "disk").glob("*/slots.bin")
        flip(slots, 100)
        for _ in range(2):
            assert equal(rows.gather(np.arange(0, 128)), mapped.gather(np.arange(0, 128))), block
        assert reader.tiers.figures.num_damaged == 1
    _, line = notes
    assert "of tokens-00000.bin in the " + tier in line
    assert "is damaged; it is read again from" in line


def test_blocks_that_are_read_more_often_move_to_memory(packed: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, memory_bytes=4 * 100_000, disk_bytes=8 * 100_000, num_readers=1)
    often, dice = [3, 9, 17], np.random.default_rng(1)
    with open_cache(config, row_layout(packed)) as (reader,):
        for block in range(NUM_BLOCKS):  # all of them once: the first ones fill the tiers
            reader.tiers.read(block)
            reader.tiers.flush()
        before = reader.tiers.places()
        assert not set(often) <= set(before[MEMORY])
        for _ in range(12):
            for block in (*often, int(dice.integers(NUM_BLOCKS))):
                reader.tiers.read(block)
                reader.tiers.flush()
        places, figures = reader.tiers.places(), reader.tiers.figures
    assert set(often) <= set(places[MEMORY])
    assert not set(places[MEMORY]) & set(places[DISK]), "a block is in one tier"
    assert figures.num_promoted > 0
    assert figures.num_demoted >= figures.num_promoted


class Interrupted(Exception):
    pass


def test_the_disk_outlives_an_error_and_is_used_again(packed: Path, tmp_path: Path, memory: Path) -> None:
    config = settings(tmp_path, memory_bytes=110_000, disk_bytes=2**23)

    def begin() -> None:
        with open_cache(config, row_layout(packed)) as (reader,):
            PackedRows(packed, reader).gather(np.arange(NUM_ROWS))
            raise Interrupted

    with pytest.raises(Interrupted):
        begin()
    assert not list(memory.iterdir())
    with open_cache(config, row_layout(packed)) as (reader,):
        PackedRows(packed, reader).gather(np.arange(NUM_ROWS))
        assert reader.tiers.figures.blocks[SOURCE] <= 1
        assert reader.tiers.figures.blocks[DISK] >= NUM_BLOCKS - 1
    assert not list((tmp_path / "disk").iterdir())


def read_endlessly(folder: Path, config: RowCacheConfig, memory: Path, seed: int, started: Any) -> None:
    row_cache.memory_folder = lambda: memory
    with open_cache(config, row_layout(folder)) as (reader,):
        loader = LookaheadLoader(
            PackedLoader(PackedRows(folder, reader), batch_rows=BATCH_ROWS, seed=seed), reader, num_ahead=4
        )
        for number in range(10**6):
            loader.batch(number)
            if number == 2:
                started.release()


def test_killed_processes_leave_nothing_behind(packed: Path, tmp_path: Path, memory: Path) -> None:
    """Two processes share the tiers of a host and are killed while they write; the next start reads the same rows and
    removes what is of no use: also that of other rows.
    """
    context, config = fork_context(), settings(tmp_path, memory_bytes=300_000, disk_bytes=600_000)
    other = settings(tmp_path, memory_bytes=200_000, disk_bytes=300_000)
    started = context.Semaphore(0)
    processes = [
        context.Process(target=read_endlessly, args=(packed, one, memory, seed, started), daemon=True)
        for seed, one in enumerate((config, config, other))
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            assert started.acquire(timeout=60)
        assert len([path for path in memory.iterdir() if path.is_dir()]) == 2, "two of them share a folder"
        time.sleep(np.random.default_rng().uniform(0, 0.2))
    finally:
        for process in processes:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
    assert len(list(memory.iterdir())) == len(list((tmp_path / "disk").iterdir())) == 4
    mapped = PackedRows(packed)
    with open_cache(config, row_layout(packed)) as (reader,):
        remove_leftovers(config)  # not of what is in use
        rows = PackedRows(packed, reader)
        assert len(list(memory.iterdir())) == len(list((tmp_path / "disk").iterdir())) == 2
        chosen = np.random.default_rng(2).permutation(NUM_ROWS)
        assert equal(rows.gather(chosen), mapped.gather(chosen))
        assert reader.tiers.figures.blocks[DISK] > 0
    assert not list(memory.iterdir())
    assert not list((tmp_path / "disk").iterdir())


def test_the_last_of_two_users_removes_the_tiers(packed: Path, tmp_path: Path, memory: Path) -> None:
    config = settings(tmp_path, memory_bytes=2**22)
    with open_cache(config, row_layout(packed)) as (one,):
        PackedRows(packed, one).gather(np.arange(NUM_ROWS))
        one.tiers.flush()
        with open_cache(config, row_layout(packed)) as (other,):
            PackedRows(packed, other).gather(np.arange(NUM_ROWS))
            assert other.tiers.figures.blocks == {MEMORY: NUM_BLOCKS, DISK: 0, SOURCE: 0}
        PackedRows(packed, one).gather(np.arange(10))
        assert list(memory.iterdir())
    assert not list(memory.iterdir())


def test_a_store_that_fails_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures, read = ColdStore("memory://rows", pause_s=0.001), list[Exception](), MemoryFileSystem.cat_file
    fsspec.filesystem("memory").pipe_file("/rows/x.bin", bytes(range(100)))

    def flaky(*arguments: Any, **options: Any) -> bytes:
        if failures:
            raise failures.pop()
        return read(*arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    failures += [TimeoutError("slow"), ConnectionError("reset")]
    assert store.read("x.bin", 10, 5) == bytes(range(10, 15))
    failures += [ConnectionError("reset")] * NUM_TRIES
    with pytest.raises(StorageError, match=r"memory://rows/x.bin: cannot be read .reset.; check the address"):
        store.read("x.bin", 10, 5)
    with pytest.raises(ArtifactError, match=r"x.bin: is truncated"):
        store.read("x.bin", 98, 5)
    failures += [PermissionError("no such right")] * 2
    with pytest.raises(StorageError, match="no such right"):
        store.read("x.bin", 10, 5)
    assert len(failures) == 1
    fsspec.filesystem("memory").rm("/rows", recursive=True)


def test_rows_are_read_before_they_are_needed(packed: Path) -> None:
    """With a source that waits, every row of the later batches is there when its batch is read."""

    class SlowSource(ColdStore):
        def read(self, name: str, offset: int, num_bytes: int) -> bytes:
            time.sleep(0.002)
            return super().read(name, offset, num_bytes)

    layout = RowLayout(packed, read_index(packed), SlowSource(str(packed)))
    reader = BlockReader(Tiers(layout), layout, num_readers=8)
    loader = PackedLoader(PackedRows(packed, reader), batch_rows=4, seed=1)
    ahead = LookaheadLoader(loader, reader, num_ahead=3)
    ahead.batch(0)
    before = reader.figures.num_ready
    for number in range(1, 6):
        time.sleep(0.1)
        ahead.batch(number)
    assert reader.figures.num_ready - before == 5 * 4
    reader.close()


def test_an_order_that_changes_forgets_what_was_expected(packed: Path) -> None:
    layout = row_layout(packed)
    reader = BlockReader(Tiers(layout), layout, num_readers=1)
    rows, mapped = PackedRows(packed, reader), PackedRows(packed)
    dice = np.random.default_rng(0)
    for _ in range(30):
        reader.expect(dice.integers(NUM_ROWS, size=40).tolist())
        chosen = dice.integers(NUM_ROWS, size=7)
        assert equal(rows.gather(chosen), mapped.gather(chosen))
    reader.close()


def test_budgets_without_room_are_refused(
    packed: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5))
    for changes, problem in (
        ({"memory_bytes": 1000}, r"cache.memory_bytes: 1,000 is too small for rows; set at least 98,\d+"),
        ({"disk_bytes": 1000}, r"cache.disk_bytes: 1,000 is too small for rows"),
        ({"disk_bytes": 2**20}, r"cache.disk_bytes: .*disk lacks room for 1,048,576 bytes .5 bytes are free.; lower"),
    ):
        config = settings(tmp_path, **changes)
        with pytest.raises(ConfigError, match=problem), open_cache(config, row_layout(packed)):
            pass
        assert not list(memory.iterdir())
    with config_error("folder"):
        RowCacheConfig(disk_bytes=5)
    index = packed / "index.json"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "index.json").write_text(index.read_text().replace("block_rows", "rows_of_old"))
    with pytest.raises(ArtifactError, match="lack checksums"):
        row_layout(tmp_path / "old")


def test_what_a_full_disk_does_not_take_is_read_from_the_source(packed: Path, tmp_path: Path, monkeypatch) -> None:
    notes: list[str] = []
    config = settings(tmp_path, memory_bytes=110_000, disk_bytes=2**22)

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    with open_cache(config, row_layout(packed), note=notes.append) as (reader,):
        rows, mapped = PackedRows(packed, reader), PackedRows(packed)
        rows.gather(np.arange(10))
        monkeypatch.setattr(os, "pwrite", full)
        for first in range(0, NUM_ROWS, 100):
            chosen = np.arange(first, first + 100)
            assert equal(rows.gather(chosen), mapped.gather(chosen))
    assert "the disk takes no more blocks (No space left on device)" in " ".join(notes)


def test_memory_and_disk_may_have_the_same_folder(packed: Path, tmp_path: Path, memory: Path) -> None:
    """As where a system without /dev/shm keeps what is in memory in the folder of temporary files."""
    config = settings(tmp_path, folder=str(memory), memory_bytes=300_000, disk_bytes=600_000)
    mapped = PackedRows(packed)

    def begin() -> None:
        with open_cache(config, row_layout(packed)) as (reader,):
            chosen = np.random.default_rng(4).permutation(NUM_ROWS)
            assert equal(PackedRows(packed, reader).gather(chosen), mapped.gather(chosen))
            raise Interrupted

    with pytest.raises(Interrupted):
        begin()
    with open_cache(config, row_layout(packed)) as (reader,):
        assert equal(PackedRows(packed, reader).gather(np.arange(NUM_ROWS)), mapped.gather(np.arange(NUM_ROWS)))
        assert reader.tiers.figures.blocks[DISK] > 0, "the disk outlives the error"
    assert not list(memory.iterdir())


def test_a_folder_that_is_swept_as_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the exclusive lock of who makes it and the shared one of who uses it another process may have come."""
    flock, num_swept = fcntl.flock, 0

    def preempted(handle: int, operation: int) -> None:
        nonlocal num_swept
        if operation == fcntl.LOCK_SH and not num_swept:
            num_swept += 1
            flock(handle, fcntl.LOCK_UN)
            row_cache.sweep(tmp_path, "rows")
        flock(handle, operation)

    monkeypatch.setattr(row_cache.fcntl, "flock", preempted)
    folder = row_cache.SharedFolder.attach(tmp_path / "rows-1", lambda folder: (folder / "table").touch())
    assert num_swept == 1
    assert (folder.path / "table").exists()
    folder.detach(remove=True)
    assert not list(tmp_path.glob("rows*"))
