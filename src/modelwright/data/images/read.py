"""Image-text pairs from files: an image with its caption file, a WebDataset archive, and records with an image.

The caption of `cat.jpg` is the text of `cat.txt` or `cat.caption` next to it, or comes from a table `metadata.jsonl` or
`metadata.csv` of its folder or one above, whose records name the image in `file_name` (the ImageFolder of Hugging Face
`datasets`).

An archive (`.tar`, `.tar.gz`) is read as a stream. Its neighboring members of one name up to the first dot are one
sample: `0001.jpg` with `0001.txt`, or with the field `caption` of `0001.json`. A record has its caption in `caption` or
`text`, and its image in `image` (the bytes, or the structure of `bytes` and `path` that Hugging Face `datasets` writes)
or, by name, in `file_name`; a conversation about the image (`sources/sources.py`) takes the place of a caption.
The class of an image, for classification, is the field `label` of a record or of `0001.json`, or the content of
`0001.cls`; an image with a class needs no caption. An unusable image is a complaint.
"""

import json
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, cast

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.images.decode import KEY, LABEL_FIELD, ImageFault, store_image
from modelwright.data.sources.fields import Fields
from modelwright.data.sources.forms import conversation_meta, is_conversation, read_conversation, record_type
from modelwright.data.sources.readers import Complaint, File

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg")
CAPTION_EXTENSIONS = (".txt", ".caption")
TABLES = ("metadata.jsonl", "metadata.csv")
NO_CAPTION = "image without a caption"
ARCHIVE_EXTENSIONS = (".tar",)
IMAGE_FIELDS = ("image", "file_name")
CAPTION_FIELDS = ("caption", "text")
LABEL_EXTENSION = ".cls"
MOST_BYTES = 100_000_000
"""Maximum size of the file of an image or of a caption; larger ones are skipped unread."""
_BAD = "bad image record"
IMAGE_WORD = "<image>"
CONVERSATION_TYPES = ("messages", "sharegpt", "question_answer", "instruction")
"""Records that may be about an image."""


def without_captions(names: Sequence[str], pass_over: Callable[[str, str], None]) -> list[str]:
    """Returns the files of a folder to read: a caption file is read with its image, and an image that a table describes
    with the table. Images without a caption are reported and left out.
    """
    paths = [PurePosixPath(name) for name in names]
    images = [path for path in paths if path.suffix.lower() in IMAGE_EXTENSIONS]
    if not images:
        return list(names)
    existing = set(paths)
    described = {path.parent for path in paths if path.name in TABLES}
    left_out: set[PurePosixPath] = set()
    for image in images:
        captions = [path for path in captions_of(image) if path in existing]
        if not described.isdisjoint(image.parents):
            left_out.add(image)
        elif captions:
            left_out.update(captions)
        else:
            left_out.add(image)
            pass_over(NO_CAPTION, str(image))
    return [name for name, path in zip(names, paths, strict=True) if path not in left_out]


def captions_of(image: PurePosixPath) -> list[PurePosixPath]:
    """Returns the possible caption files of an image."""
    return [image.with_suffix(extension) for extension in CAPTION_EXTENSIONS]


def companions(file: File) -> list[str]:
    """Returns the files that are read with a file: the caption of an image, the images that a table may name."""
    path = PurePosixPath(file.path)
    if file.extension in IMAGE_EXTENSIONS:
        return [str(one) for one in captions_of(path) if file.filesystem.exists(str(one))]
    if path.name not in TABLES:
        return []
    return [
        str(name) for name in file.filesystem.find(str(path.parent)) if str(name).lower().endswith(IMAGE_EXTENSIONS)
    ]


@dataclass
class _Sample:
    """Members of an archive that belong together."""

    key: str
    image: bytes | None = None
    caption: str = ""
    label: str = ""
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def read_image(file: File, complain: Complaint) -> Iterator[Document]:
    """Reads the image of a file with its caption."""
    path = PurePosixPath(file.path)
    found = [str(caption) for caption in captions_of(path) if file.filesystem.exists(str(caption))]
    if not found:
        names = " or ".join(caption.name for caption in captions_of(PurePosixPath(file.name)))
        complain(NO_CAPTION, file.name, "has no caption", f"write it into {names}")
        return
    try:
        caption, data = _bytes_of(file, found[0]).decode("utf-8-sig"), _bytes_of(file, file.path)
    except UnicodeDecodeError as error:
        complain("not UTF-8", found[0], f"is not UTF-8 ({error})", "convert the file (iconv -f LATIN1 -t UTF-8)")
        return
    except DataError as error:
        complain(_BAD, file.name, f"cannot be used ({error})", "replace the file")
        return
    yield from _document(file.name, caption, data, file.name, complain)


def is_image_record(record: Mapping[str, Any]) -> bool:
    """Returns True for a record with an image or the name of an image file; the URL of an image is neither."""
    if _named_image(record):
        return True
    image = record.get("image")
    return isinstance(image, bytes) or (isinstance(image, dict) and {"bytes", "path"} <= image.keys())


def read_image_record(where: str, record: Fields, file: File, complain: Complaint) -> Iterator[Document]:
    """Reads the image-text pair of a record, or its conversation about the image."""
    kind = record_type(name for name, value in record.plain.items() if value is not None)
    if kind in CONVERSATION_TYPES and is_conversation(record):
        try:
            record.plain = without_image_parts(record.plain)
            turns = read_conversation(record, kind)
            roles = [turn["role"] for turn in turns]
            # The first question of the user is about the image.
            if "user" not in roles or "assistant" in roles[: roles.index("user")]:
                raise ValueError("the conversation does not begin with a turn of the user, which the image belongs to")
            data = _bytes_of_record(record, file)
        except (ValueError, DataError) as error:
            complain(_BAD, where, str(error), "correct the record")
            return
        text, meta = conversation_meta(turns)
        for document in _document(where, text, data, file.name, complain, label=_label(record)):
            yield replace(document, text=text, meta={**document.meta, **meta})
        return
    caption = next((value for name in CAPTION_FIELDS if (value := record.get(name))), "")
    if isinstance(caption, list):
        caption = next((one for one in caption if isinstance(one, str) and one.strip()), "")
    if not isinstance(caption, str):
        complain(NO_CAPTION, where, f"has a {type(caption).__name__} as its caption", "give a text")
        return
    try:
        data = _bytes_of_record(record, file)
    except DataError as error:
        complain(_BAD, where, str(error), "correct the record")
        return
    yield from _document(where, caption, data, file.name, complain, label=_label(record))


def without_image_parts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record without marks of the image's place: neither parts of the type `image` (Hugging Face) nor the
    word `<image>` (LLaVA). Raises `ValueError` for several images.
    """
    num_images, changed = 0, dict(record)
    for name in ("question", "instruction", "input"):
        if isinstance(text := record.get(name), str) and IMAGE_WORD in text:
            num_images += text.count(IMAGE_WORD)
            changed[name] = text.replace(IMAGE_WORD, "").strip()
    for name, key in (("messages", "content"), ("conversations", "value")):
        turns = record.get(name)
        if not isinstance(turns, list):
            continue
        changed[name] = found = []
        for turn in cast(list[Any], turns):
            content = turn.get(key) if isinstance(turn, dict) else None
            if isinstance(content, list):
                parts = cast(list[Any], content)
                others = [one for one in parts if not (isinstance(one, dict) and one.get("type") == "image")]
                num_images += len(parts) - len(others)
                content = others
            elif isinstance(content, str) and IMAGE_WORD in content:
                num_images += content.count(IMAGE_WORD)
                content = content.replace(IMAGE_WORD, "").strip()
            found.append(turn if content is None else {**turn, key: content})
    if num_images > 1:
        raise ValueError(f"the conversation has {num_images} images; one can be learned from")
    return changed


def read_archive(file: File, complain: Complaint) -> Iterator[Document]:
    """Reads the image-text pairs of a WebDataset archive, in order. Those before damage are yielded first."""
    try:
        with file.filesystem.open(file.path, "rb") as raw:
            for sample in _samples(raw, file):
                where = f"{file.name}: {sample.key}"
                for reason, problem in sample.problems:
                    complain(reason, where, problem, "correct the sample")
                if sample.image is not None and not sample.problems:
                    yield from _document(where, sample.caption, sample.image, file.name, complain, label=sample.label)
    except FileNotFoundError:
        raise DataError(f"{file.name}: no such file; check --data.sources") from None
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        problem = f"the archive is damaged or cut off ({error})"
        complain("damaged file", file.name, problem, "fetch the file again")


def _samples(raw: Any, file: File) -> Iterator[_Sample]:
    mode = "r|gz" if file.compression == "gz" else "r|"  # a stream: archives may exceed memory, and stores cannot seek
    sample: _Sample | None = None
    with tarfile.open(fileobj=raw, mode=mode) as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = encodable(f"{folder}/{stem}" if folder else stem)
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = _Sample(key)
            if member.size > MOST_BYTES:
                sample.problems.append(
                    (_BAD, f"{encodable(member.name)} has {member.size:,} bytes, limit {MOST_BYTES:,}")
                )
                continue
            content, suffix = archive.extractfile(member), f".{extension.lower()}"
            assert content is not None
            data = content.read()
            try:  # members of other kinds are ignored
                if suffix in IMAGE_EXTENSIONS:
                    sample.image = data
                elif suffix in CAPTION_EXTENSIONS:
                    sample.caption = data.decode("utf-8-sig")
                elif suffix == LABEL_EXTENSION:
                    sample.label = data.decode("utf-8-sig").strip()
                elif suffix == ".json":
                    record = json.loads(data)
                    if not isinstance(record, dict):
                        raise ValueError(f"the JSON is a {type(record).__name__} where an object is expected")
                    # Members come in any order, and the files of a caption and a class win over the fields.
                    caption = next((record[name] for name in CAPTION_FIELDS if name in record), "")
                    sample.caption = sample.caption or (caption if isinstance(caption, str) else "")
                    sample.label = sample.label or _label(record)
            except (ValueError, RecursionError) as error:
                sample.problems.append((_BAD, f"{suffix} cannot be read ({error})"))
    if sample is not None:
        yield sample


def _label(record: Mapping[str, Any]) -> str:
    """Returns the class of an image, a name or a number; "" without one."""
    # True is an int in Python, but it is not a class.
    value = record.get(LABEL_FIELD)
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""


def encodable(text: str) -> str:
    """Replaces lone surrogates by question marks: JSON and names in archives may have them, but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _document(
    where: str, caption: str, data: bytes, source: str, complain: Complaint, *, label: str = ""
) -> Iterator[Document]:
    for name, text in (("caption or conversation", caption), (LABEL_FIELD, label)):
        if encodable(text) != text:
            problem = f"the {name} has one half of a surrogate pair without the other"
            complain("half a surrogate pair", where, problem, "write the whole character, or remove it")
            return
    # The class of an image is its caption if it has no other.
    caption = caption if caption.strip() else label
    if not caption.strip():
        complain(NO_CAPTION, where, "has no caption", "write one")
        return
    try:
        stored = store_image(data)
    except ImageFault as fault:
        complain(fault.reason, where, str(fault), "replace the image")
        return
    text = caption.strip()
    meta: dict[str, Any] = {KEY: stored.plain()} | ({LABEL_FIELD: label} if label else {})
    yield Document(id=where, text=text, kind="image", split="open", source=source, meta=meta)


def _bytes_of(file: File, path: str) -> bytes:
    """Returns the content of a file of the same file system as `file`. Raises `DataError` if it cannot be read."""
    try:
        # Checked before the read: a file may exceed the memory.
        size = file.filesystem.info(path).get("size") or 0
        if size > MOST_BYTES:
            raise DataError(f"{path}: has {size:,} bytes, limit {MOST_BYTES:,}")
        with file.filesystem.open(path, "rb") as handle:
            content: Any = handle.read()
            return content
    except FileNotFoundError:
        raise DataError(f"{path}: no such image file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def _bytes_of_record(record: Mapping[str, Any], file: File) -> bytes:
    image = record.get("image")
    if isinstance(image, bytes):
        return image
    name = _named_image(record)
    if isinstance(image, dict):
        if isinstance(image["bytes"], bytes):
            return image["bytes"]
        name = image["path"]
    is_name = isinstance(name, str) and "\0" not in name and encodable(name) == name
    if not is_name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError(f"names the image {name!r}, which is not a path within the folder of the table")
    return _bytes_of(file, str(PurePosixPath(file.path).parent / name))


def _named_image(record: Mapping[str, Any]) -> str:
    """Returns the name of an image file in a record, or ""."""
    names = (record[name] for name in IMAGE_FIELDS if isinstance(record.get(name), str))
    files = [one for one in names if "://" not in one]
    if isinstance(name := record.get("image"), str) and ".." in PurePosixPath(name).parts:
        # Whatever it ends with: it is refused as a path, not read as a record without text.
        return name
    return next((one for one in files if one.lower().endswith(IMAGE_EXTENSIONS)), "")
