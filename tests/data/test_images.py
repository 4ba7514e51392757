"""Images with captions: every source gives the same pairs; every fault is a counted skip or is handled; cleaning."""

import contextlib
import io
import json
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image, ImageFile

from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean import deduplicate
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import read_dropped, read_kept
from modelwright.data.clean.steps.images import NEAR, TOO_LONG, TOO_SMALL, near_duplicates
from modelwright.data.clean.steps.quality import QualityConfig
from modelwright.data.document import Document
from modelwright.data.images import read as read_module
from modelwright.data.images.decode import (
    DAMAGED,
    EMPTY,
    NOT_AN_IMAGE,
    TOO_LARGE,
    TRUNCATED,
    VECTOR,
    ImageFault,
    StoredImage,
    decode,
    image_size,
    perceptual_hash,
    store_image,
)
from modelwright.data.images.store import ImageStore, write_images
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.workers import InProcess, LocalProcesses
from refusals import config_error


def picture(seed: int, width: int = 64, height: int = 48) -> np.ndarray:
    """A smooth random picture [H, W, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def file_of(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def read(*sources: Any, **settings: Any) -> tuple[list[Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=tuple(map(str, sources)), validation_fraction=0.0, **settings)
    return list(read_documents(config, report=report)), report


def pairs(documents: list[Document]) -> dict[str, str]:
    """The digest of the image of each caption."""
    assert {document.kind for document in documents} == {"image"}
    return {document.text: StoredImage.from_plain(document.meta["image"]).digest for document in documents}


CAPTIONS = [f"picture number {number}" for number in range(3)]
FILES = [file_of(picture(number)) for number in range(3)]


def folder_with_texts(folder: Path) -> Path:
    for number, (caption, data) in enumerate(zip(CAPTIONS, FILES, strict=True)):
        (folder / f"{number}.png").write_bytes(data)
        (folder / f"{number}.{'txt' if number else 'caption'}").write_text(caption + "\n")
    return folder


def folder_with_table(folder: Path) -> Path:
    (folder / "train").mkdir()
    lines = []
    for number, (caption, data) in enumerate(zip(CAPTIONS, FILES, strict=True)):
        (folder / "train" / f"{number}.png").write_bytes(data)
        lines.append(json.dumps({"file_name": f"train/{number}.png", "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def archive(folder: Path, *, compressed: bool = False) -> Path:
    path = folder / f"shard.tar{'.gz' if compressed else ''}"
    with tarfile.open(path, "w:gz" if compressed else "w") as tar:
        for number, (caption, data) in enumerate(zip(CAPTIONS, FILES, strict=True)):
            described = {"txt": caption.encode()} if number else {"json": json.dumps({"caption": caption}).encode()}
            for extension, content in {"png": data, "cls": b"3", **described}.items():
                member = tarfile.TarInfo(f"a/{number:04}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def table(folder: Path, *, as_structure: bool) -> Path:
    images = [{"bytes": data, "path": None} if as_structure else data for data in FILES]
    column = {"caption": [CAPTIONS[0], CAPTIONS[1], CAPTIONS[2]]}
    pyarrow.parquet.write_table(pa.table({"image": images, **column, "width": [1, 2, 3]}), folder / "pairs.parquet")
    return folder / "pairs.parquet"


@pytest.mark.parametrize(
    "write",
    [
        folder_with_texts,
        folder_with_table,
        archive,
        lambda folder: archive(folder, compressed=True),
        lambda folder: table(folder, as_structure=True),
        lambda folder: table(folder, as_structure=False),
    ],
    ids=["captions", "metadata", "tar", "tar.gz", "parquet structure", "parquet bytes"],
)
def test_every_source_gives_the_same_pairs(write: Callable[[Path], Path], tmp_path: Path) -> None:
    documents, report = read(write(tmp_path))
    assert pairs(documents) == {
        caption: store_image(data).digest for caption, data in zip(CAPTIONS, FILES, strict=True)
    }
    assert report.documents == {"image": 3}
    assert not report.skipped
    assert not report.passed_over
    for document, data in zip(sorted(documents, key=lambda one: one.text), FILES, strict=True):
        stored = StoredImage.from_plain(document.meta["image"])
        assert (stored.width, stored.height) == (64, 48)
        np.testing.assert_array_equal(decode(stored.data), decode(data))


def test_images_without_a_caption_are_passed_over_and_a_named_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lone.png").write_bytes(FILES[0])
    (tmp_path / "a.txt").write_text("Only text.")
    documents, report = read(tmp_path)
    assert [document.kind for document in documents] == ["prose"]
    assert report.passed_over == {"image without a caption": 1}
    with pytest.raises(DataError, match=r"lone\.png: has no caption; write it into lone\.txt or lone\.caption"):
        read(tmp_path / "lone.png")


def test_a_split_follows_the_image_and_not_the_caption(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.png").write_bytes(file_of(picture(number)))
        (tmp_path / f"{number}.txt").write_text("the same words")
    report = SourceReport()
    documents = read_documents(SourceConfig(sources=(str(tmp_path),), validation_fraction=0.3), report=report)
    splits = [document.split for document in documents]
    assert 4 <= splits.count("heldout") <= 22


def test_captions_of_one_image_are_in_one_split(tmp_path: Path) -> None:
    """Otherwise images of the held-out split would be trained on under their other captions."""
    records = []
    for number in range(20):
        (tmp_path / f"{number}.png").write_bytes(file_of(picture(number)))
        records += [{"file_name": f"{number}.png", "text": f"caption {place} of {number}"} for place in range(4)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)))
    splits: dict[str, set[str]] = {}
    config = SourceConfig(sources=(str(tmp_path),), validation_fraction=0.4)
    for one in read_documents(config, report=SourceReport()):
        splits.setdefault(one.meta["image"]["data"], set()).add(one.split)
    assert len(splits) == 20
    assert {len(found) for found in splits.values()} == {1}
    assert set().union(*splits.values()) == {"train", "heldout"}


def test_files_that_are_too_large_are_skipped_like_other_bad_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with_texts(tmp_path)
    monkeypatch.setattr(read_module, "MOST_BYTES", len(FILES[0]) - 1)
    sizes = [len(data) for data in FILES]
    documents, report = read(tmp_path, on_bad_record="skip")
    assert report.skipped == {"bad image record": sum(size >= len(FILES[0]) for size in sizes)}
    assert len(documents) == sum(size < len(FILES[0]) for size in sizes)
    with pytest.raises(DataError, match=r"limit .*replace the file"):
        read(tmp_path)


def write_archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("content", [b'["caption"]', b"[]", b"3", b"[" * 100_000])
def test_json_of_a_sample_that_is_no_object_is_a_bad_record(content: bytes, tmp_path: Path) -> None:
    path = write_archive(
        tmp_path / "shard.tar", {"0.png": FILES[0], "0.json": content, "1.png": FILES[1], "1.txt": b"b"}
    )
    documents, report = read(path, on_bad_record="skip")
    assert [one.text for one in documents] == ["b"]
    assert report.skipped == {"bad image record": 1}


def test_names_that_utf_8_cannot_hold_are_replaced(tmp_path: Path) -> None:
    record = json.dumps({"caption": "a", "label": "x"}).encode()
    path = write_archive(tmp_path / "shard.tar", {"a\udcff.png": FILES[0], "a\udcff.json": record})
    (document,), _ = read(path)
    assert Document.from_plain(json.loads(document.to_json().encode("utf-8"))).id.endswith("a?")


@pytest.mark.parametrize("name", ["caption", "label"])
def test_half_a_surrogate_pair_is_not_replaced_in_what_is_learned(tmp_path: Path, name: str) -> None:
    """Two classes whose names differ in it would become one."""
    bad, good = {"caption": "a", "label": "x", name: "x\ud800"}, {"caption": "b\U0001f600", "label": "y"}
    members = {
        "0.png": FILES[0],
        "0.json": json.dumps(bad).encode(),
        "1.png": FILES[1],
        "1.json": json.dumps(good).encode(),
    }
    path = write_archive(tmp_path / "shard.tar", members)
    with pytest.raises(DataError, match=rf"0: the .*{name}.* has one half of a surrogate pair"):
        read(path)
    documents, report = read(path, on_bad_record="skip")
    assert [one.text for one in documents] == ["b\U0001f600"]
    assert report.skipped == {"half a surrogate pair": 1}


def test_a_text_that_names_the_url_of_an_image_stays_a_text(tmp_path: Path) -> None:
    (tmp_path / "pages.jsonl").write_text(json.dumps({"text": "Words.", "image": "https://example.org/a.jpg"}))
    (document,), _ = read(tmp_path)
    assert (document.kind, document.text) == ("prose", "Words.")


def test_a_damaged_store_is_an_error_of_the_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="images are missing; run the pack stage again"):
        ImageStore(tmp_path)
    with write_images(tmp_path) as images:
        images.add(FILES[0])
    for offsets in (b"", b"\x93NUMPY"):
        (tmp_path / "offsets.npy").write_bytes(offsets)
        with pytest.raises(ArtifactError, match="the index of the images is damaged; run the pack stage again"):
            ImageStore(tmp_path)


def test_limits_that_cannot_be_are_named() -> None:
    with config_error("clean.quality.limits.image.min_side"):
        build_steps(CleanConfig(quality=QualityConfig(limits={"image.min_side": 0})))


def png_of_size(width: int, height: int) -> bytes:
    """A small file that claims to be a large image, with all of its rows present as zeros."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(1 + width // 8) * 100) for _ in range(height // 100)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


PHOTO = file_of(picture(7, 320, 240), "JPEG", quality=90)
WEBP = file_of(picture(7, 320, 240), "WEBP")
FAULTS = {
    "truncated.jpg": (PHOTO[: len(PHOTO) // 2], TRUNCATED),
    "header.jpg": (PHOTO[:200], TRUNCATED),
    "cut.webp": (WEBP[: len(WEBP) // 2], TRUNCATED),
    "cut.png": (FILES[0][: len(FILES[0]) // 2], TRUNCATED),
    "bomb.png": (png_of_size(10_000, 10_000), TOO_LARGE),
    "drawing.svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', VECTOR),
    "drawing.png": (b"\xef\xbb\xbf <svg/>", VECTOR),
    "empty.png": (b"", EMPTY),
    "text.jpg": (b"<html>404 not found</html>", NOT_AN_IMAGE),
    "broken.png": (FILES[1][:60] + bytes(40) + FILES[1][100:], DAMAGED),
}


@pytest.mark.parametrize("name", ["../up/x.jpg", "..", "../up/x.tga", "a/../../x"])
def test_a_path_that_leaves_the_folder_is_refused_as_such(name: str, tmp_path: Path) -> None:
    (tmp_path / "table.jsonl").write_text(json.dumps({"image": name, "caption": "what it should be"}))
    with pytest.raises(
        DataError, match=r"table\.jsonl:1: names the image '.*not a path within the folder of the table"
    ):
        read(tmp_path)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_a_counted_skip(name: str, tmp_path: Path) -> None:
    data, reason = FAULTS[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / name).with_suffix(".txt").write_text("what it should be")
    with pytest.raises(DataError, match=f"{name}.*on_bad_record skip"):
        read(tmp_path)
    folder_with_texts(tmp_path)
    told: list[tuple[str, str]] = []
    report = SourceReport(on_skip=lambda reason, where, problem: told.append((reason, Path(where).name)))
    config = SourceConfig(sources=(str(tmp_path),), validation_fraction=0.0, on_bad_record="skip")
    assert len(pairs(list(read_documents(config, report=report)))) == 3
    assert report.skipped == {reason: 1}
    assert told == [(reason, name)]


def test_a_bomb_is_refused_before_anything_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(*args: Any) -> Any:
        raise AssertionError("the pixels were decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", unpacked)
    for side in (10_000, 30_000):  # above our limit; above Pillow's own
        with pytest.raises(ImageFault) as caught:
            decode(png_of_size(side, side))
        assert caught.value.reason == TOO_LARGE


def test_cmyk_becomes_rgb() -> None:
    pixels = picture(3)
    data = file_of(Image.fromarray(pixels).convert("CMYK"), "JPEG", quality=95)
    assert np.abs(decode(data).astype(int) - pixels).mean() < 6


def test_exif_rotation_is_applied() -> None:
    pixels = picture(4)
    for orientation, expected in ((3, pixels[::-1, ::-1]), (6, np.rot90(pixels, -1)), (8, np.rot90(pixels))):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = file_of(pixels, exif=exif)
        np.testing.assert_array_equal(decode(data), expected)
        assert image_size(data) == expected.shape[1::-1]
        assert store_image(data).width == expected.shape[1]


def test_16_bits_are_scaled_and_not_clipped() -> None:
    gray = np.linspace(0, 65535, 64 * 48).reshape(48, 64).astype(np.uint16)
    found = decode(file_of(Image.fromarray(gray)))
    assert found.shape == (48, 64, 3)
    np.testing.assert_array_equal(found[..., 0], gray // 257)


def test_transparent_parts_are_white_and_palettes_have_their_colors() -> None:
    pixels = np.dstack([picture(5), np.full((48, 64), 255, np.uint8)])
    pixels[:10, :, 3] = 0
    found = decode(file_of(pixels))
    assert (found[:10] == 255).all()
    np.testing.assert_array_equal(found[10:], pixels[10:, :, :3])
    palette = Image.fromarray(picture(5)).quantize(16)
    np.testing.assert_array_equal(decode(file_of(palette)), np.asarray(palette.convert("RGB")))


def test_random_bytes_in_a_file_never_raise_anything_else() -> None:
    random = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        data = bytearray(file_of(picture(1), kind))
        for _ in range(30):
            changed = bytearray(data)
            for place in random.integers(0, len(data), 8):
                changed[place] = random.integers(0, 256)
            with contextlib.suppress(ImageFault):
                decode(bytes(changed))


def test_large_photographs_are_stored_smaller() -> None:
    stored = store_image(file_of(picture(6, 1200, 900), "JPEG"))
    assert (stored.width, stored.height) == (1200, 900)
    assert decode(stored.data).shape == (256, 341, 3)
    assert len(stored.data) < 40_000


def test_damaged_archives_and_tables_keep_what_precedes_the_damage(tmp_path: Path) -> None:
    path = archive(tmp_path)
    path.write_bytes(path.read_bytes()[: int(0.6 * len(b"".join(FILES)))])
    documents, report = read(path, on_bad_record="skip")
    assert set() < set(pairs(documents)) < set(CAPTIONS)
    assert report.skipped == {"damaged file": 1}
    with pytest.raises(DataError, match=r"shard\.tar: the archive is damaged"):
        read(path)


@pytest.mark.parametrize("name", ["/etc/hostname.png", "../outside.png", "absent.png"])
def test_a_table_names_images_of_its_own_folder_only(name: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "outside.png").write_bytes(FILES[0])
    (tmp_path / "set" / "metadata.jsonl").write_text(json.dumps({"file_name": name, "text": "a caption"}))
    with pytest.raises(DataError, match=r"metadata\.jsonl:1: .*(not a path within|no such image)"):
        read(tmp_path / "set")


def test_a_machine_without_pillow_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with_texts(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with config_error("images", match=r"pip install 'modelwright\[images\]'"):
        read(tmp_path)


def cleaned(documents: list[Document], folder: Path, **settings: Any) -> tuple[list[str], dict[str, str]]:
    """The captions that are kept, and the reasons for which others are not."""
    steps = build_steps(CleanConfig(quality=QualityConfig(limits={f"image.{k}": v for k, v in settings.items()})))
    clean_documents(iter(documents), steps, folder, SilentProgress(), shard_documents=3)
    kept = [document.text for document in read_kept(folder)]
    return kept, {entry.document.text: entry.reason for entry in read_dropped(folder)}


def document(caption: str, data: bytes, split: str = "train") -> Document:
    meta = {"image": store_image(data).plain()}
    return Document(id=caption, text=caption, kind="image", split=split, source="test", meta=meta)  # type: ignore[arg-type]


def test_cleaning_drops_by_size_shape_and_perceptual_hash(tmp_path: Path) -> None:
    again = file_of(picture(0, 200, 150), "JPEG", quality=60)  # the same picture, larger and compressed
    documents = [
        document("small copy", file_of(picture(0))),
        document("large copy", again),
        document("another", file_of(picture(1))),
        document("tiny", file_of(picture(2, 20, 20))),
        document("banner", file_of(picture(3, 400, 40))),
        document("held-out copy", file_of(picture(4, 60, 40)), split="heldout"),
        document("training copy", file_of(picture(4, 240, 160))),
    ]
    kept, dropped = cleaned(documents, tmp_path / "a")
    assert kept == ["large copy", "another", "held-out copy"]
    assert dropped == {
        "small copy": NEAR, "tiny": TOO_SMALL, "banner": TOO_LONG, "training copy": NEAR,
    }  # fmt: skip
    kept, dropped = cleaned(documents, tmp_path / "b", min_side=1, max_aspect=100, max_hash_distance=-1)
    assert len(kept) == len(documents)


def test_many_images_may_share_a_caption(tmp_path: Path) -> None:
    caption = (
        "the " * 9 + "same long caption of more than twenty words that stands under every single picture of the set"
    )
    documents = [document(caption, file_of(picture(number))) for number in range(5)]
    assert len(cleaned(documents, tmp_path)[0]) == 5
    kept, _ = cleaned([documents[0], documents[0]], tmp_path / "twice")
    assert len(kept) == 1


def test_near_duplicates_are_those_of_every_pair_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplicate, "_FEWEST_IN_WORKERS", 1)
    random = np.random.default_rng(1)
    bases = random.integers(0, 2**63, 12, dtype=np.uint64)
    flips = [
        sum(1 << int(bit) for bit in random.choice(64, size, replace=False)) for size in random.integers(0, 9, 200)
    ]
    hashes = np.array([int(bases[place % 12]) ^ flip for place, flip in enumerate(flips)], np.uint64)
    for most in (0, 3, 6):
        kept: list[int] = []
        dropped: set[int] = set()
        for number in range(len(hashes)):
            near = any((int(hashes[number]) ^ int(hashes[other])).bit_count() <= most for other in kept)
            (dropped.add if near else kept.append)(number)
        engine = LocalProcesses(2, start_after_s=0.0) if most == 3 else InProcess()
        found = near_duplicates(np.arange(len(hashes), dtype=np.uint32), hashes, most, tmp_path, engine).tolist()
        assert {number for number, _, _ in found} == dropped
        assert not list(tmp_path.iterdir())
        assert all((int(hashes[a]) ^ int(hashes[b])).bit_count() == bits <= most for a, b, bits in found)


@pytest.mark.slow
def test_near_duplicates_take_few_bytes_an_image(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        hashes = np.random.default_rng(2).integers(0, 2**63, count, dtype=np.uint64)
        order = np.arange(count, dtype=np.uint32)
        tracemalloc.start()
        assert len(near_duplicates(order, hashes, 4, tmp_path, InProcess())) < count // 100
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    few, many = 5_000, 25_000
    assert (peak(many) - peak(few)) / (many - few) < 80, "beside 23 of the columns that the step reads"


def test_hashes_survive_scaling_and_compression_and_tell_pictures_apart() -> None:
    hashes = [perceptual_hash(picture(number)) for number in range(30)]
    for number in range(30):
        again = perceptual_hash(decode(file_of(picture(number, 256, 192), "JPEG", quality=70)))
        assert (hashes[number] ^ again).bit_count() <= 4
    apart = [(a ^ b).bit_count() for a in hashes for b in hashes if a != b]
    assert min(apart) > 6


def test_cleaned_image_documents_are_read_again_as_they_are(tmp_path: Path) -> None:
    documents = [document(f"picture {number}", file_of(picture(number))) for number in range(3)]
    cleaned(documents, tmp_path)
    assert [one.to_json() for one in read(tmp_path)[0]] == [one.to_json() for one in documents]
    broken = json.loads(documents[0].to_json())
    broken["meta"]["image"]["data"] = "no base64*"
    (tmp_path / "one.jsonl").write_text(json.dumps(broken))
    kinds = {one.kind for one in read(tmp_path / "one.jsonl")[0]}
    assert kinds == {"prose"}  # a record with a text, not a document of ours
