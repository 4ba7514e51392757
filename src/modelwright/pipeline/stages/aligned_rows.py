"""The rows that the stage align learns from: pairs of a text with an image or with code.

Groups of two rows: texts, and what belongs to them. Code is tokens; an image is two end tokens whose value is its
number plus 1 in the store `images-<split>` beside the rows.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from modelwright.core.errors import DataError
from modelwright.data.clean import read_kept
from modelwright.data.docstring_pairs import described_functions
from modelwright.data.document import Document, Split
from modelwright.data.images.store import ImageStore, StoreWriter, write_images
from modelwright.data.images.stored import KEY, StoredImage
from modelwright.data.loader import PackedRows
from modelwright.data.pack import TokenSequence
from modelwright.data.row_labels import row_source
from modelwright.data.tokenizer import Tokenizer
from modelwright.pipeline.stages.rows import PackJob, RowSet, Sequences

MOST_IMAGES = 2**24 - 2
"""Numbers of images travel as FP32."""


@dataclass
class _WaitingPairs:
    """Pairs whose texts are being encoded, in order."""

    pairs: deque[tuple[Document, int]] = field(default_factory=deque[tuple[Document, int]])
    """A document, and the number of its image or -1 for code."""


def _pack_aligned(job: PackJob, split: Split) -> None:
    with write_images(images_folder(job.context.output.path / ALIGNED_ROWS.name, split)) as images:
        job.pack(f"{ALIGNED_ROWS.name}/{split}", _sequences(job, split, images), group_size=2)


def images_folder(rows: Path, split: str) -> Path:
    """Where the images of a split are. rows: the folder of this set of rows."""
    return rows / f"images-{split}"


def open_images(rows: Path, split: str) -> ImageStore | None:
    """The images of a split, None if it has none."""
    folder = images_folder(rows, split)
    store = ImageStore(folder) if folder.is_dir() else None
    return store if store is not None and len(store) else None


def _sequences(job: PackJob, split: Split, images: StoreWriter) -> Sequences:
    waiting = _WaitingPairs()

    def texts() -> Iterator[str]:
        """The text of each pair, and its code where it has any."""
        for document in read_kept(job.clean, split=split):
            if document.kind == "image":
                number = images.add(StoredImage.from_plain(document.meta[KEY]).data)
                if number > MOST_IMAGES:
                    raise DataError(f"pack: there are more than {MOST_IMAGES:,} images; pack them in several runs")
                waiting.pairs.append((document, number))
                yield document.text
            elif document.kind == "code":
                for pair in described_functions(document.text):
                    waiting.pairs.append((document, -1))
                    yield pair.text
                    yield pair.code

    encoded = job.tokenizer.encode_documents(texts(), num_threads=job.config.hardware.num_threads)
    for text_ids in encoded:
        document, number = waiting.pairs.popleft()
        other_ids = next(encoded) if number < 0 else np.full(2, job.tokenizer.end_id)
        source, value = row_source(document, job.settings.group_by), float(number + 1)
        for ids in (text_ids, other_ids):
            yield TokenSequence(_fitted(ids, job.settings.seq_len), source=source, value=value)


def _fitted(ids: np.ndarray, seq_len: int) -> np.ndarray:
    """The beginning of a sequence, with room for its end token."""
    return ids if len(ids) <= seq_len - 1 else ids[: seq_len - 1]


@dataclass(frozen=True)
class AlignedPair:
    """A pair as it was packed, cut to the length of a row. image: its number; -1 for code."""

    text: str
    text_ids: np.ndarray
    code_ids: np.ndarray
    image: int


def read_pairs(rows: PackedRows, tokenizer: Tokenizer) -> Sequence[AlignedPair]:
    """The pairs of packed rows, in their order."""
    found: list[AlignedPair] = []
    for batch in rows.batches(1):
        tokens, segments = batch.input_ids_BT.numpy(), batch.segments_BT.numpy()
        values = batch.extras["values_BT"].numpy()
        for piece in range(int(segments[0].max()) + 1):
            text_ids, other_ids = (tokens[side][segments[side] == piece] for side in range(2))
            number = round(float(values[1][segments[1] == piece][0])) - 1
            found.append(AlignedPair(tokenizer.decode(text_ids).strip(), text_ids, other_ids, number))
    return found


ALIGNED_ROWS = RowSet(
    name="aligned_pairs",
    title="texts with images and code",
    pack=_pack_aligned,
    documents="image with a caption and no described function",
    trained_rows=2,
    stdlib_bytes=6e6,
)
