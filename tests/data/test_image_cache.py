"""Images through the cache: the same bytes as from a mapped file, checksums, budgets, reading ahead, kills."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import parse
from modelwright.data.images.store import BLOCK_CHECKSUMS, FILE, INDEX, OFFSETS, ImageStore, image_layout, write_images
from modelwright.data.rows.ahead import ImagesAhead, LookaheadLoader, images_of, own_images
from modelwright.data.rows.cache import row_cache
from modelwright.data.rows.cache.layout import BLOCK_BYTES, damaged
from modelwright.data.rows.cache.reader import DISK, MEMORY, SOURCE, BlockReader, Tiers
from modelwright.data.rows.cache.row_cache import RowCacheConfig, open_cache, remove_leftovers
from modelwright.data.rows.loader import PackedLoader, PackedRows, PlannedLoader, build_loader, row_layout
from modelwright.data.rows.order import BatchingConfig
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from own_tiers import use_own_memory, wait_for_expected
from rank_processes import fork_context

NUM_IMAGES, BATCH_ROWS, SEQ_LEN = 240, 12, 8


def files() -> list[bytes]:
    """Of 10 bytes to more than two blocks; one ends where a block does, another is a whole block."""
    dice = np.random.default_rng(0)
    sizes = dice.integers(10, 12_000, NUM_IMAGES).tolist()
    sizes[7] = 2 * BLOCK_BYTES + 500
    sizes[30] += -sum(sizes[:31]) % BLOCK_BYTES
    sizes[31] = BLOCK_BYTES
    return [dice.bytes(size) for size in sizes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two tokens with one image each, of two sources, and those images."""
    path = tmp_path_factory.mktemp("images")
    with write_images(path / "images") as images:
        numbers = [images.add(data) for data in files()]
    sequences = [TokenSequence([1, 1], source="ab"[number % 2], value=float(number + 1)) for number in numbers]
    config = PackConfig(seq_len=SEQ_LEN, mode="one_per_row", group_by="source")
    pack(sequences, path / "rows", config, vocab_size=8, eos_id=0)
    return path


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test alone in place of that in memory."""
    return use_own_memory(tmp_path / "memory", monkeypatch)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the images that a test may change."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in (folder / "images").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def settings(tmp_path: Path, **changes: Any) -> RowCacheConfig:
    values: dict[str, Any] = {"enabled": True, "folder": str(tmp_path / "disk"), "num_readers": 4}
    return RowCacheConfig(**{**values, **changes})


def disk_usage(path: Path) -> int:
    """Bytes that the files of a folder take."""
    return sum(one.stat().st_blocks * 512 for one in path.rglob("*") if one.is_file())


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_every_block_is_the_bytes_of_the_file(folder: Path) -> None:
    layout, content = image_layout(folder / "images"), (folder / "images" / FILE).read_bytes()
    assert content == b"".join(files())
    assert layout.total_bytes == len(content)
    assert layout.num_blocks == -(-len(content) // BLOCK_BYTES) > 20
    for block in range(layout.num_blocks):
        (part,) = layout.parts(block)
        assert part.offset == block * BLOCK_BYTES
        own = content[part.offset : part.offset + part.num_bytes]
        assert len(own) == layout.num_bytes_of(block)
        assert damaged(layout, block, own) is None
        for at in (0, len(own) // 2, len(own) - 1):
            flipped = bytearray(own)
            flipped[at] ^= 1
            assert damaged(layout, block, bytes(flipped)) == part


def test_the_blocks_of_an_image_have_all_of_it(folder: Path) -> None:
    layout, content = image_layout(folder / "images"), (folder / "images" / FILE).read_bytes()
    assert [len(layout.blocks_of(number)) for number in (7, 31)] == [3, 1]
    for number, data in enumerate(files()):
        blocks = layout.blocks_of(number)
        starts = [block * BLOCK_BYTES for block in blocks]
        cuts = [
            layout.cut(number, block, content[start : start + BLOCK_BYTES])
            for block, start in zip(blocks, starts, strict=True)
        ]
        assert all(cuts)
        assert layout.join([cuts]) == [data]


@pytest.mark.parametrize("sizes", [[], [0], [BLOCK_BYTES], [BLOCK_BYTES - 1, 1, 1], [3 * BLOCK_BYTES + 1]], ids=str)
def test_a_store_of_any_size_is_read_as_it_was_written(sizes: list[int], tmp_path: Path) -> None:
    written = [np.random.default_rng(size).bytes(size) for size in sizes]
    with write_images(tmp_path / "images") as images:
        for data in written:
            images.add(data)
    layout = image_layout(tmp_path / "images")
    assert layout.num_blocks == -(-sum(sizes) // BLOCK_BYTES)
    reader = BlockReader(Tiers(layout), layout, num_readers=2)
    for store in (ImageStore(tmp_path / "images"), ImageStore(tmp_path / "images", reader)):
        assert store.read(range(len(sizes))) == written
    reader.close()


def plain_loader(rows: PackedRows) -> PackedLoader:
    return PackedLoader(rows, batch_rows=BATCH_ROWS, seed=3)


def mixing_loader(rows: PackedRows) -> PlannedLoader:
    """A loader whose plan changes when its mixture does."""
    mixture = parse(
        BatchingConfig, {"mixture": {"weights": {"a": 1, "b": 2}, "update": "heldout_loss"}}, constants=True
    )
    loader = build_loader(
        rows, mixture, batch_rows=BATCH_ROWS, by_tokens=False, seed=3, num_steps_of=lambda per_epoch: 100,
        row_losses=lambda: np.zeros(rows.num_rows),
    )  # fmt: skip
    assert isinstance(loader, PlannedLoader)
    return loader


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (2, 3)])
@pytest.mark.parametrize("loader_of", [plain_loader, mixing_loader])
def test_images_and_rows_share_the_tiers_and_their_budgets(
    folder: Path, tmp_path: Path, memory: Path, loader_of: Callable[[PackedRows], Any], rank: int, world_size: int
) -> None:
    """Also after a plan that has changed since its images began to be read, and after going back."""
    budget, expected = 6 * BLOCK_BYTES, files()
    config = settings(tmp_path, memory_bytes=budget, disk_bytes=budget)
    plain = loader_of(PackedRows(folder / "rows"))
    layouts = (row_layout(folder / "rows"), image_layout(folder / "images"))
    with open_cache(config, *layouts) as (row_reader, image_reader):
        assert row_reader.tiers is image_reader.tiers
        planned = loader_of(PackedRows(folder / "rows", row_reader))
        loader = LookaheadLoader(planned, row_reader, num_ahead=3)
        store = ImageStore(folder / "images", image_reader)
        ahead = ImagesAhead(image_reader, loader, own_images, num_ahead=3)
        for step, index in enumerate((*range(30), 7, 8, 60)):
            batch = loader.batch(index, rank=rank, world_size=world_size)
            ahead.expect(index, rank, world_size)
            numbers = (batch.extras["values_BT"][:, 0].round().long() - 1).tolist()
            assert list(dict.fromkeys(numbers)) == own_images(plain, index, rank, world_size)
            assert store.read(numbers) == [expected[number] for number in numbers]
            assert disk_usage(memory) <= budget + 2 * 4096  # whole pages
            assert disk_usage(tmp_path / "disk") <= budget + 2 * 4096
            if loader_of is mixing_loader and step % 4 == 3 and step < 28:
                for one in (plain, planned):
                    one.mixture.update(index + 1, np.roll([0.8, 0.2], step // 4))
        places, figures = image_reader.tiers.places(), image_reader.tiers.figures.blocks
        assert len(places[MEMORY]) >= 4
        assert {block < layouts[0].num_blocks for block in places[MEMORY] + places[DISK]} == {True, False}
    assert min(figures.values()) > 0, figures
    assert not list(memory.iterdir())
    assert not list((tmp_path / "disk").iterdir())


def test_images_are_read_before_they_are_needed(folder: Path) -> None:
    layout = image_layout(folder / "images")
    reader = BlockReader(Tiers(layout), layout, num_readers=8)
    loader, store = plain_loader(PackedRows(folder / "rows")), ImageStore(folder / "images", reader)
    ahead = ImagesAhead(reader, loader, own_images, num_ahead=2)
    for index in range(6):
        ahead.expect(index, 0, 1)
        wait_for_expected(reader)
        before = reader.figures.num_ready
        for coming in range(index, index + 3):
            store.read(own_images(loader, coming, 0, 1))
        assert reader.figures.num_ready - before == 3 * BATCH_ROWS
        assert not set(own_images(loader, index + 3, 0, 1)) & set(reader._expected)
    reader.close()


def test_rows_name_their_images_without_being_read(folder: Path) -> None:
    class Unread:
        def read(self, rows: np.ndarray) -> Any:
            raise AssertionError("tokens were read")

    rows = PackedRows(folder / "rows", Unread())
    whole = PackedRows(folder / "rows").gather(np.arange(rows.num_groups))
    expected = (whole.extras["values_BT"][:, 0].long() - 1).tolist()
    assert images_of(rows, np.arange(rows.num_groups)) == expected
    assert sorted(expected) == list(range(NUM_IMAGES))
    assert images_of(rows, np.array([4, 4])) == [expected[4]]


def spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    ends = np.cumsum([0, *(len(data) for data in files())]).tolist()
    return [(ends[number], ends[number + 1]) for number in numbers]


@pytest.mark.parametrize("number", [0, 31, NUM_IMAGES - 1])
def test_a_flipped_byte_of_a_mapped_file_is_named(copy: Path, number: int) -> None:
    """Whenever its image is read, and not when others are."""
    store = ImageStore(copy)
    ((first, last),) = spans([number])
    flip(copy / FILE, last - 1)
    others = [one for one in range(NUM_IMAGES) if one != number]
    assert len(store.read(others)) == NUM_IMAGES - 1
    problem = rf"{copy}/{FILE}: bytes {first:,} to {last:,} \(image {number}\) are damaged"
    for _ in range(2):
        with pytest.raises(ArtifactError, match=problem):
            store.data(number)
    with pytest.raises(ArtifactError, match=problem):
        list(store.squares([number], size=4, fit="crop"))


@pytest.mark.slow
def test_a_flipped_byte_at_the_source_is_named(copy: Path, tmp_path: Path) -> None:
    first, last = 3 * BLOCK_BYTES, 4 * BLOCK_BYTES
    flip(copy / FILE, first + 9)
    layout = image_layout(copy)
    with open_cache(settings(tmp_path), layout) as (reader,):
        store = ImageStore(copy, reader)
        whole = [number for number in range(NUM_IMAGES) if 3 not in layout.blocks_of(number)]
        assert store.read(whole) == [files()[number] for number in whole]
        with pytest.raises(ArtifactError, match=rf"{copy}: bytes {first:,} to {last:,} of {FILE} are damaged"):
            store.data(next(number for number in range(NUM_IMAGES) if 3 in layout.blocks_of(number)))
    (copy / FILE).unlink()
    with (
        open_cache(settings(tmp_path), layout) as (reader,),
        pytest.raises(ArtifactError, match=rf"{FILE}: is missing"),
    ):
        ImageStore(copy, reader).data(0)


@pytest.mark.parametrize("tier", [MEMORY, DISK])
def test_a_flipped_byte_in_a_tier_is_named_and_read_again(
    folder: Path, tmp_path: Path, memory: Path, tier: str
) -> None:
    notes: list[str] = []
    config = settings(tmp_path, memory_bytes=2**23 if tier == MEMORY else 70_000, disk_bytes=2**23)
    with open_cache(config, image_layout(folder / "images"), note=notes.append) as (reader,):
        store = ImageStore(folder / "images", reader)
        store.read(range(NUM_IMAGES))
        reader.tiers.flush()
        (slots,) = (memory if tier == MEMORY else tmp_path / "disk").glob("*/slots.bin")
        flip(slots, 100)
        for _ in range(2):
            assert store.read(range(NUM_IMAGES)) == files()
        assert reader.tiers.figures.num_damaged == 1
    _, line = notes
    assert f"of {FILE} in the {tier} is damaged; it is read again from {folder / 'images'}" in line


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda copy: (copy / INDEX).unlink(), "the images lack checksums; remove the stage pack"),
        (lambda copy: (copy / INDEX).write_text("{}"), "index of the images is damaged; run the pack stage again"),
        (lambda copy: (copy / OFFSETS).write_bytes(b""), "index of the images is damaged"),
        (lambda copy: np.save(copy / BLOCK_CHECKSUMS, np.zeros(1, np.uint32)), "index of the images is damaged"),
        (lambda copy: (copy / FILE).write_bytes(b"x"), f"{FILE}: is missing or truncated; run the pack stage again"),
    ],
)
def test_a_store_that_is_old_or_damaged_is_refused(copy: Path, change: Callable[[Path], Any], problem: str) -> None:
    change(copy)
    with pytest.raises(ArtifactError, match=problem):
        ImageStore(copy)


def test_bytes_that_are_no_image_are_named(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=rf"{FILE}: image 3 is of no known image format; run the pack stage again"):
        ImageStore(folder / "images").pixels(3, size=8, fit="crop")


def read_endlessly(folder: Path, config: RowCacheConfig, memory: Path, seed: int, started: Any) -> None:
    row_cache.memory_folder = lambda: memory
    with open_cache(config, row_layout(folder / "rows"), image_layout(folder / "images")) as (rows, images):
        loader = PackedLoader(PackedRows(folder / "rows", rows), batch_rows=BATCH_ROWS, seed=seed)
        store, ahead = (
            ImageStore(folder / "images", images),
            ImagesAhead(images, loader, own_images, num_ahead=4),
        )
        for index in range(10**6):
            ahead.expect(index, 0, 1)
            store.read(own_images(loader, index, 0, 1))
            loader.batch(index)
            if index == 2:
                started.release()


@pytest.mark.slow
def test_killed_processes_leave_nothing_behind(folder: Path, tmp_path: Path, memory: Path) -> None:
    """Two processes share the tiers of a host and are killed while they write images; the next start reads the same
    ones and removes what is of no use.
    """
    context, config = fork_context(), settings(tmp_path, memory_bytes=300_000, disk_bytes=600_000)
    started = context.Semaphore(0)
    processes = [
        context.Process(target=read_endlessly, args=(folder, config, memory, seed, started), daemon=True)
        for seed in range(2)
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            assert started.acquire(timeout=60)
        assert len([path for path in memory.iterdir() if path.is_dir()]) == 1, "both share a folder"
        time.sleep(np.random.default_rng().uniform(0, 0.2))
    finally:
        for process in processes:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
    assert list(memory.iterdir())
    assert list((tmp_path / "disk").iterdir())
    layouts = (row_layout(folder / "rows"), image_layout(folder / "images"))
    with open_cache(config, *layouts) as (_, reader):
        remove_leftovers(config)  # not of what is in use
        chosen = np.random.default_rng(2).permutation(NUM_IMAGES).tolist()
        assert ImageStore(folder / "images", reader).read(chosen) == [files()[number] for number in chosen]
        assert reader.tiers.figures.blocks[DISK] > 0
        assert reader.tiers.figures.blocks[SOURCE] > 0
    assert not list(memory.iterdir())
    assert not list((tmp_path / "disk").iterdir())
