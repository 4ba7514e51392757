"""The rows that the stage align learns from: pairs of a text with an image or with code.

Groups of two rows: texts, and what belongs to them. Code is tokens; an image is two end tokens whose value is its
number plus 1 in the store `images-<split>` beside the rows.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from modelwright.core.errors import DataError
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document, Split
from modelwright.data.images.store import FORMAT, StoreWriter, images_folder, write_images
from modelwright.data.images.stored import KEY, StoredImage
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.origins import row_source
from modelwright.data.rows.pack import TokenSequence
from modelwright.data.sources.docstrings import described_functions
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.pipeline.stage import RowSet
from modelwright.pipeline.stages.rows import PackJob, Sequences

MOST_IMAGES = 2**24 - 2
"""Numbers of images travel as FP32."""
ROWS_READ_AT_ONCE = 64
"""Rows, or groups of them, that are read together where all are read in their order."""


@dataclass
class _WaitingPairs:
    """Pairs whose texts are being encoded, in order."""

    pairs: deque[tuple[Document, int]] = field(default_factory=deque[tuple[Document, int]])
    """A document, and the number of its image or -1 for code."""


def _pack_aligned(job: PackJob, split: Split) -> None:
    with write_images(images_folder(job.context.output.path / ALIGNED_ROWS.name, split)) as images:
        job.pack(f"{ALIGNED_ROWS.name}/{split}", _sequences(job, split, images), group_size=2)


def _sequences(job: PackJob, split: Split, images: StoreWriter) -> Sequences:
    waiting = _WaitingPairs()

    def texts() -> Iterator[str]:
        """The text of each pair, and its code where it has any."""
        for document in read_kept(job.clean, split=split, kinds=("image", "code")):
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


def read_pairs(rows: PackedRows, tokenizer: Tokenizer) -> Iterator[AlignedPair]:
    """The pairs of packed rows, in their order."""
    for batch in rows.batches(ROWS_READ_AT_ONCE):
        whole = (batch.input_ids_BT, batch.segments_BT, batch.extras["values_BT"])
        groups = (one.unflatten(0, (-1, 2)).numpy() for one in whole)
        for tokens, segments, values in zip(*groups, strict=True):
            for piece in range(int(segments[0].max()) + 1):
                text_ids, other_ids = (tokens[side][segments[side] == piece] for side in range(2))
                number = round(float(values[1][segments[1] == piece][0])) - 1
                yield AlignedPair(tokenizer.decode(text_ids).strip(), text_ids, other_ids, number)


ALIGNED_ROWS = RowSet(
    name="aligned_pairs",
    title="texts with images and code",
    pack=_pack_aligned,
    documents="image with a caption and no described function",
    trained_rows=2,
    learned="images",
    decides=lambda config: {"images": FORMAT},
    stdlib_bytes=6e6,
)
