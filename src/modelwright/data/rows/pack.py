"""Packs token sequences into rows on disk.

A shard folder holds rows of `seq_len` tokens, filled with whole sequences where they fit (best fit, longest first):

    index.json        seq_len, counts, dtypes, files
    tokens-00000.bin  [rows, seq_len] uint16, or uint32 when the vocabulary needs it; unused ends hold the end token
    mask-00000.bin    [rows, seq_len] uint8, only when a sequence came with a loss mask: 1 where the token is a target
    lengths.bin       uint32, the lengths of the pieces, row after row
    offsets.bin       int64 [rows + 1], where each row's pieces start in lengths.bin
    checksums.bin     uint32, of each block of rows, for the cache and for readers of a store (`cache/layout.py`)
    scores.bin        float32 [rows], only when sequences came with scores: the mean over the tokens of the row
    values.bin        float32 [pieces], only when sequences came with values; in the order of lengths.bin

and the documents of the rows where sequences came with an origin (last paragraph).

A sequence longer than a row is cut into pieces that overlap by one token: the last token of a piece is the first of the
next, so every token but a sequence's first is predicted exactly once. Chunks overlap by more: the tokens that they
repeat are context, without a label. Sequences of different sources never share a row, and the rows of a source are
consecutive.

Sequences that belong together (the two answers of a preference pair) are packed as groups of `group_size` consecutive
rows: their first sequences share the first row of a group, their second ones the second row, in the same order, so that
piece k of each row belongs to the same group of sequences. They are never cut.

Memory is bounded by about 60 bytes per piece: the tokens wait in a spool file while the rows are planned.

Origins of packed rows: their source and score, and the document of each of their pieces.

A mixture weighs the source and a curriculum sorts by the score; augmentation changes the document while a model trains.
`pack` writes next to the rows, where their sequences have an `Origin`:

    origins.bin           int32 [pieces, 5] in the order of lengths.bin: the number of the document, the number of the
                          sequence among those of the document, the piece's first token in the sequence, how many
                          tokens at its beginning an earlier piece has too, and whether the sequence ends with it
    documents.jsonl       the documents, one a line, in the order in which they were packed
    document_offsets.bin  int64 [documents + 1], where each line starts
"""

import json
import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from modelwright.core.artifacts import ArtifactError, write_atomic, writing
from modelwright.core.config import ConfigError, DataError, constant
from modelwright.data.document import Document
from modelwright.data.rows.cache.layout import CHECKSUMS, rows_of_block
from modelwright.data.tokenizer.chat import ChatLoss

ORIGINS, DOCUMENTS, DOCUMENT_OFFSETS = "origins.bin", "documents.jsonl", "document_offsets.bin"
COMPRESSION_RATIO = "compression_ratio"
# Fixed, because scores depend on it.
COMPRESSION_LEVEL = 6


class Origin(NamedTuple):
    """Origin of a sequence of tokens. part: its number among the sequences of the document, which are consecutive."""

    document: Document
    part: int = 0


class PieceOrigin(NamedTuple):
    """Origin of a piece of a row. document: number for `RowOrigins.document`; part: number of the sequence in the
    document; first: index of the piece's first token in the sequence; num_repeated: tokens at its beginning that an
    earlier piece has too; is_last: the sequence ends with the piece.
    """

    document: int
    part: int
    first: int
    num_repeated: int
    is_last: bool


class OriginSpool:
    """Writes origins while rows are packed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pieces = array("i")
        self._offsets = array("q", [0])
        self._last: Document | None = None
        self._file = open(folder / DOCUMENTS, "wb", buffering=2**20)  # noqa: SIM115

    def add(self, origin: Origin, *, first: int, num_repeated: int, is_last: bool) -> None:
        """Adds the origin of the next piece."""
        # The pieces of a document are consecutive, so comparing with the last one stores each document once.
        if origin.document is not self._last:
            self._last = origin.document
            # Lone surrogates survive the round trip.
            num_bytes = self._file.write(origin.document.to_json().encode("utf-8", "surrogatepass") + b"\n")
            self._offsets.append(self._offsets[-1] + num_bytes)
        self._pieces.extend((len(self._offsets) - 2, origin.part, first, num_repeated, int(is_last)))

    def write(self, order: np.ndarray) -> None:
        """Writes the origins of the pieces in this order [pieces]."""
        self.close()
        pieces = np.frombuffer(self._pieces, dtype=np.int32).reshape(-1, len(PieceOrigin._fields))
        if len(pieces) != len(order):
            raise ValueError("only some of the sequences have an origin")
        pieces[order].tofile(self.folder / ORIGINS)
        np.frombuffer(self._offsets, dtype=np.int64).tofile(self.folder / DOCUMENT_OFFSETS)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class RowOrigins:
    """The origins of the rows in a folder, mapped into memory."""

    pieces: np.ndarray
    """Fields of `PieceOrigin` [pieces, 5] int32."""
    row_starts: np.ndarray
    """Index of each row's first piece, [rows + 1] int64."""
    text: np.ndarray
    """Bytes of the documents."""
    offsets: np.ndarray
    """Index of each document's first byte, [documents + 1] int64."""

    @classmethod
    def open(cls, folder: Path) -> "RowOrigins":
        """Maps the origins of a folder. Raises `ArtifactError` if the rows were packed without origins."""
        try:
            offsets = np.fromfile(folder / DOCUMENT_OFFSETS, dtype=np.int64)
            return cls(
                pieces=np.memmap(folder / ORIGINS, dtype=np.int32, mode="r").reshape(-1, len(PieceOrigin._fields)),
                row_starts=np.memmap(folder / "offsets.bin", dtype=np.int64, mode="r"),
                text=np.memmap(folder / DOCUMENTS, dtype=np.uint8, mode="r"),
                offsets=offsets,
            )
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{folder}: the documents of the rows are missing ({error}); run the pack stage again"
            ) from None

    def of_row(self, row: int) -> Sequence[PieceOrigin]:
        """Returns the origins of the pieces in one row, in order."""
        rows = self.pieces[self.row_starts[row] : self.row_starts[row + 1]].tolist()
        return [
            PieceOrigin(document, part, first, num_repeated, bool(is_last))
            for document, part, first, num_repeated, is_last in rows
        ]

    def document(self, number: int) -> Document:
        """Returns the document of a number."""
        line = self.text[self.offsets[number] : self.offsets[number + 1]].tobytes()
        return Document.from_json(line.decode("utf-8", "surrogatepass"))


def row_source(document: Document, group_by: Literal["none", "kind", "source"]) -> str:
    """Returns the name of the source to which the rows of a document belong; "" without sources."""
    return {"none": "", "kind": document.kind, "source": document.source}[group_by]


def row_score(document: Document, score: str) -> float | None:
    """Returns the score of a document: compressed over uncompressed bytes (zlib; a repetitive text is easy), or its
    numeric field `score` from `meta`; None if `score` is "".

    Raises `DataError` if the field is missing or not a finite number.
    """
    if not score:
        return None
    if score == COMPRESSION_RATIO:
        raw = document.text.encode("utf-8", "replace")
        return len(zlib.compress(raw, COMPRESSION_LEVEL)) / max(1, len(raw))
    value = document.meta.get(score)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        names = ", ".join(map(str, document.meta)) or "none"
        raise DataError(
            f"{document.id}: the field {score!r} is {value!r}, not a number (fields of the record: {names}); "
            "name it in data.keep_fields and give every record one, or set batching.curriculum.by to "
            f"{COMPRESSION_RATIO}"
        )
    return float(value)


FORMAT = "modelwright-rows/1"
INDEX = "index.json"

TokenIds = Sequence[int] | np.ndarray
LossMask = Sequence[int] | np.ndarray
# The spool keeps the source of each piece in 16 bits.
MAX_SOURCES = 2**16
ROWS_AT_ONCE = 4096
"""Number of rows that are assembled in memory before they are written."""


class TokenSequence(NamedTuple):
    """The tokens of a document or a conversation, as `pack` receives them."""

    ids: TokenIds
    mask: LossMask | None = None
    """1 where the token is a target; None if every token is."""
    source: str = ""
    """Name of the source; sequences of different sources never share a row."""
    score: float | None = None
    """Difficulty or quality; all sequences have one, or none has."""
    value: float | None = None
    """A number that an objective reads, such as a label or a margin; all sequences have one, or none has."""
    origin: Origin | None = None
    """The document that is stored with the rows; all sequences have one, or none has."""


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Settings of packing."""

    seq_len: int = 512
    """Tokens in a row."""
    mode: Literal["best_fit", "one_per_row", "length_buckets"] = "best_fit"
    """`best_fit` packs several sequences into a row; `one_per_row` pads each; `length_buckets` makes batches of single
    sequences of similar length, padded to the longest, up to `batch_tokens` tokens."""
    long_documents: Literal["split", "chunk", "skip"] = "split"
    """Treatment of documents longer than a row: `split` divides them; `chunk` divides them into overlapping chunks of
    `seq_len` tokens; both truncate conversations. `skip` drops and counts documents and conversations."""
    text_kinds: tuple[Literal["prose", "code", "qa"], ...] = ("prose", "code")
    """Kinds of documents for pretraining, as whole texts. `qa` adds conversations, which also serve if no others
    exist."""
    chat_loss: ChatLoss = "assistant"
    """Tokens of a conversation that fine-tuning learns: `assistant` those of all answers (by the marks of the chat
    template, if any), `last_answer` those of the last one (completion only), `all` all up to the last answer."""
    chunk_overlap: int = constant(50)
    """`chunk`: number of tokens that a chunk repeats from the one before it, as context."""
    min_chunk_tokens: int = constant(256)
    """`chunk`: minimum tokens of a chunk, at most a row and more than it repeats; a shorter last chunk begins earlier
    and repeats more."""
    group_by: Literal["none", "kind", "source"] = constant("none")
    """Property that documents of a row have in common; `batching.mixture` sets it."""
    score: str = constant("")
    """Score that is stored with each row (`Origin`); `batching.curriculum` sets it."""
    keep_documents: bool = constant(False)
    """True stores the documents of training rows with them; the section `augmentation` sets it."""
    shard_bytes: int = constant(256 * 2**20)
    """Size at which a shard file is closed."""

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ConfigError(f"seq_len: {self.seq_len} leaves nothing to predict; choose 2 or more")
        if not self.text_kinds:
            raise ConfigError("text_kinds: is empty, so that pretraining has nothing to learn; name prose, code or qa")
        if len(set(self.text_kinds)) < len(self.text_kinds):
            raise ConfigError(f"text_kinds: names a kind twice, got {', '.join(self.text_kinds)}; name each once")
        if self.shard_bytes < 1:
            raise ConfigError(f"shard_bytes: {self.shard_bytes} is not positive; for example 268435456")
        if self.long_documents != "chunk":
            return
        if not 1 <= self.chunk_overlap < self.seq_len:
            raise ConfigError(
                f"long_documents: chunk repeats {self.chunk_overlap} tokens of the chunk before, and rows have "
                f"{self.seq_len} tokens (pack.seq_len); make rows longer, or choose split"
            )


@dataclass(kw_only=True)
class PackReport:
    """Counts of packing. `num_tokens` counts the tokens of pieces (the overlap of cut sequences twice), `fill` is their
    share of the rows, `skipped` counts sequences and pieces that were left out, by reason."""

    num_sequences: int = 0
    num_cut: int = 0
    num_pieces: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    fill: float = 0.0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def pack(
    sequences: Iterable[TokenSequence | tuple[TokenIds, LossMask | None]],
    folder: Path,
    config: PackConfig,
    *,
    vocab_size: int,
    eos_id: int,
    group_size: int = 1,
) -> PackReport:
    """Packs sequences into the shard folder `folder` (created if missing).

    Each sequence comes with None (every token is a target) or a loss mask of the same length (1: the token is a
    target). A sequence without a mask must end with `eos_id`, which is appended where it is missing. A sequence with a
    mask is packed unchanged. The same sequences give the same bytes. group_size: number of consecutive sequences that
    belong together; each must fit into a row, with a target. Raises `DataError` when nothing is left to pack or an id
    is outside the vocabulary, and `StorageError` when the disk is full.
    """
    report = PackReport()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        spool = _Spool(folder, np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32), group_size)
        try:
            for sequence in sequences:
                whole = sequence if isinstance(sequence, TokenSequence) else TokenSequence(*sequence)
                _add(spool, whole, config, report, vocab_size=vocab_size, eos_id=eos_id)
            spool.finish()
            if not spool.lengths:
                why = "no document reached this stage; look at the counts of the clean stage"
                if report.num_sequences:
                    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(report.skipped.items()))
                    why = f"all {report.num_sequences} sequences were left out ({reasons})"
                    why += "; raise seq_len or look at the documents"
                raise DataError(f"{folder}: there is nothing to pack; {why}")
            lengths = np.array(spool.lengths, dtype=np.int64)
            # The rows of a source are consecutive, in the order of the sources.
            # A group takes the space of its longest sequence in every one of its rows, so that pieces stay aligned.
            group_of = np.empty(len(lengths) // group_size, dtype=np.int64)
            longest = lengths.reshape(-1, group_size).max(axis=1)
            sources = np.frombuffer(spool.piece_sources, dtype=np.uint16)[::group_size]
            num_groups = 0
            for source, number in spool.source_numbers.items():
                chosen = np.flatnonzero(sources == number)
                groups = (
                    best_fit(longest[chosen], config.seq_len) if config.mode == "best_fit" else np.arange(len(chosen))
                )
                group_of[chosen] = num_groups + groups
                spool.source_rows[source] = (int(groups.max()) + 1) * group_size
                num_groups += int(groups.max()) + 1
            rows = (group_of[:, None] * group_size + np.arange(group_size)).flatten()
            _write_rows(spool, lengths, rows, folder, config, report, vocab_size=vocab_size, eos_id=eos_id)
        finally:
            spool.remove()
    return report


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each piece [N] int64: longest first, each into the row with the least sufficient space.

    Pieces of equal length are placed together: the fullest row that has space for one gets as many more as fit, which
    is also where one-by-one best fit puts them. Cost grows with the number of distinct lengths, not of pieces.
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    values, counts = np.unique(lengths, return_counts=True)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the space that is left
    present = 0  # bit c is set when open_rows[c] has a row
    num_rows = start = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = start + count
        while start < end:
            wide_enough = present >> length
            # The lowest bit that is set: the least space that takes a piece of this length.
            space = length + (wide_enough & -wide_enough).bit_length() - 1 if wide_enough else capacity
            per_row = space // length
            needed = -(-(end - start) // per_row)
            if wide_enough:
                taken, open_rows[space] = open_rows[space][:needed], open_rows[space][needed:]
                present &= ~(1 << space) if not open_rows[space] else -1
            else:
                taken = list(range(num_rows, num_rows + needed))
                num_rows += needed
            placed = min(end - start, len(taken) * per_row)
            row_of[order[start : start + placed]] = np.repeat(taken, per_row)[:placed]
            start += placed
            in_last = placed - (len(taken) - 1) * per_row
            for rows, left in ((taken[:-1], space - per_row * length), (taken[-1:], space - in_last * length)):
                if rows and left:
                    open_rows[left].extend(rows)
                    present |= 1 << left
    return row_of


class _Spool:
    """Writes tokens and masks of the pieces into files, one after another, until their rows are known."""

    def __init__(self, folder: Path, dtype: np.dtype, group_size: int) -> None:
        self.dtype = dtype
        self.group_size = group_size
        self.lengths: list[int] = []
        self.has_mask = False
        self.source_numbers: dict[str, int] = {}
        self.source_rows: dict[str, int] = {}
        """Number of rows of each source, once they are assigned."""
        self.piece_sources = array("H")
        self.scores = array("f")
        self.values = array("f")
        self.folder = folder
        self.origins: OriginSpool | None = None
        self.paths = [folder / "spool-tokens.tmp", folder / "spool-mask.tmp"]
        self._files: list[BinaryIO] = [open(path, "wb", buffering=2**20) for path in self.paths]  # noqa: SIM115

    def add(
        self, sequence: TokenSequence, ids: np.ndarray, mask: np.ndarray | None, *,
        first: int, num_repeated: int, is_last: bool,
    ) -> None:  # fmt: skip
        """Adds a piece of a sequence. first, num_repeated, is_last: see `PieceOrigin`."""
        number = self.source_numbers.setdefault(sequence.source, len(self.source_numbers))
        if number == MAX_SOURCES:
            raise DataError(
                f"the documents come from more than {MAX_SOURCES:,} sources; set pack.group_by to kind or none"
            )
        for name, numbers, own in (("score", self.scores, sequence.score), ("value", self.values, sequence.value)):
            if len(numbers) != (0 if own is None else len(self.lengths)):
                raise ValueError(f"only some of the sequences have a {name}")
            if own is not None:
                numbers.append(own)
        self.piece_sources.append(number)
        self.lengths.append(len(ids))
        # The file of masks has all pieces, because any later one may have a mask.
        self.has_mask |= mask is not None
        self._files[0].write(ids.astype(self.dtype).tobytes())
        self._files[1].write(b"\1" * len(ids) if mask is None else mask.tobytes())
        if sequence.origin is not None:
            self.origins = self.origins or OriginSpool(self.folder)
            self.origins.add(sequence.origin, first=first, num_repeated=num_repeated, is_last=is_last)

    def finish(self) -> None:
        for file in [*self._files, *([self.origins] if self.origins else [])]:
            file.close()

    def remove(self) -> None:
        try:
            self.finish()
        finally:  # closing fails on a full disk
            for path in self.paths:
                path.unlink(missing_ok=True)


def _add(
    spool: _Spool, sequence: TokenSequence, config: PackConfig, report: PackReport, *, vocab_size: int, eos_id: int
) -> None:
    tokens = np.ascontiguousarray(sequence.ids, dtype=np.int64)
    targets = None if sequence.mask is None else np.asarray(sequence.mask, dtype=np.uint8)
    if targets is not None and len(targets) != len(tokens):
        raise ValueError(f"sequence {report.num_sequences}: {len(tokens)} tokens but {len(targets)} mask values")
    if len(tokens) and int(tokens.view(np.uint64).max()) >= vocab_size:  # a negative id is a huge one
        text = f"sequence {report.num_sequences}: a token id lies outside the vocabulary of {vocab_size}"
        raise DataError(f"{text}; tokenize again with the tokenizer that the model was built for")
    if targets is None:
        tokens = with_end(tokens, eos_id)
    fits = 2 <= len(tokens) <= config.seq_len and (targets is None or bool(targets[1:].any()))
    if spool.group_size > 1 and not fits:
        raise ValueError(f"sequence {report.num_sequences}: does not fit into a row with a target, but is in a group")
    report.num_sequences += 1
    if len(tokens) < 2:
        return report.skip("empty")
    if len(tokens) > config.seq_len:
        if config.long_documents == "skip":
            return report.skip("longer than a row")
        report.num_cut += 1
    if config.long_documents == "chunk":
        min_tokens = min(max(config.min_chunk_tokens, config.chunk_overlap + 1), config.seq_len)
        cuts = chunks(len(tokens), config.seq_len, overlap=config.chunk_overlap, min_tokens=min_tokens)
    else:
        cuts = pieces(len(tokens), config.seq_len)
    before = 0
    for start, end in cuts:
        # Tokens that the piece before has too are no targets again.
        num_repeated, before = before - start, end
        piece_targets = targets_of_piece(targets, start, end, num_repeated)
        if piece_targets is not None and not piece_targets[1:].any():
            report.skip("piece without a target")
            continue
        is_last = end == len(tokens)
        spool.add(sequence, tokens[start:end], piece_targets, first=start, num_repeated=num_repeated, is_last=is_last)
        report.num_targets += end - start - 1 if piece_targets is None else int(piece_targets[1:].sum())
    return None


def with_end(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Returns the tokens of a sequence without a mask, with `eos_id` appended where it is missing."""
    return tokens if len(tokens) and tokens[-1] == eos_id else np.append(tokens, eos_id)


def targets_of_piece(targets: np.ndarray | None, start: int, end: int, num_repeated: int) -> np.ndarray | None:
    """Returns the loss mask of a piece, None if every token is a target."""
    # The first token of a piece is never a target, so a single repeated token needs no mask.
    if num_repeated <= 1:
        return None if targets is None else targets[start:end]
    piece_targets = np.ones(end - start, dtype=np.uint8) if targets is None else targets[start:end].copy()
    piece_targets[:num_repeated] = 0
    return piece_targets


def chunks(length: int, chunk_len: int, *, overlap: int, min_tokens: int) -> Iterator[tuple[int, int]]:
    """Yields `[start, end)` of chunks of `chunk_len` tokens, of which each repeats `overlap` tokens of the one before.
    A last chunk that would have fewer than `min_tokens` begins earlier and repeats more, so that no token is lost. A
    sequence that is not longer than a chunk is one chunk, however short.
    """
    start, end = 0, min(length, chunk_len)
    yield start, end
    while end < length:
        # The right side uses the old `end`: the next chunk begins `overlap` tokens before it.
        start, end = end - overlap, min(length, end - overlap + chunk_len)
        yield min(start, end - min_tokens), end


def pieces(length: int, seq_len: int) -> Iterator[tuple[int, int]]:
    """Yields `[start, end)` of pieces of at most `seq_len` tokens that overlap by one token."""
    # The last token of a piece is the first of the next one, or it would be predicted by none.
    for start in range(0, length - 1, seq_len - 1):
        yield start, min(start + seq_len, length)


def _write_rows(
    spool: _Spool, lengths: np.ndarray, rows: np.ndarray, folder: Path, config: PackConfig, report: PackReport, *,
    vocab_size: int, eos_id: int,
) -> None:  # fmt: skip
    starts = np.concatenate([[0], np.cumsum(lengths)])
    # Stable, so that the pieces of a row keep their order: the same sequences give the same bytes.
    order = np.argsort(rows, kind="stable")
    num_rows = int(rows.max()) + 1
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))]).astype(np.int64)
    tokens = np.memmap(spool.paths[0], dtype=spool.dtype, mode="r")
    masks = np.memmap(spool.paths[1], dtype=np.uint8, mode="r") if spool.has_mask else None
    row_bytes = config.seq_len * spool.dtype.itemsize
    per_file, block_rows = max(1, config.shard_bytes // row_bytes), rows_of_block(row_bytes)
    files, checksums = [], list[list[list[int]]]()
    for number, first in enumerate(range(0, num_rows, per_file)):
        last = min(first + per_file, num_rows)
        chosen = (order, starts, offsets[first : last + 1], config.seq_len, block_rows)
        files.append({"tokens": f"tokens-{number:05d}.bin", "rows": last - first})
        checksums.append([_fill_file(folder / files[-1]["tokens"], tokens, *chosen, empty=eos_id)])
        if masks is not None:
            files[-1]["mask"] = f"mask-{number:05d}.bin"
            checksums[-1].append(_fill_file(folder / files[-1]["mask"], masks, *chosen, empty=0))
    np.hstack([np.array(of_file, dtype=np.uint32) for of_file in checksums]).T.tofile(folder / CHECKSUMS)
    lengths[order].astype(np.uint32).tofile(folder / "lengths.bin")
    offsets.tofile(folder / "offsets.bin")
    report.num_rows, report.num_pieces, report.num_tokens = num_rows, len(lengths), int(lengths.sum())
    report.fill = report.num_tokens / (num_rows * config.seq_len)
    # Readers take defaults for absent entries.
    further: dict[str, Any] = {}
    if list(spool.source_rows) != [""]:
        further["sources"] = spool.source_rows
    if spool.scores:
        # The score of a row is the mean of its pieces' scores, weighted by their tokens.
        totals = np.bincount(rows, weights=lengths * np.frombuffer(spool.scores, dtype=np.float32))
        (totals / np.bincount(rows, weights=lengths)).astype(np.float32).tofile(folder / "scores.bin")
        further["has_scores"] = True
    if spool.values:
        np.frombuffer(spool.values, dtype=np.float32)[order].tofile(folder / "values.bin")
        further["has_values"] = True
    if spool.origins:
        spool.origins.write(order)
        further["has_origins"] = True
    if spool.group_size > 1:
        further["group_size"] = spool.group_size
    index = {
        "format": FORMAT, "seq_len": config.seq_len, "vocab_size": vocab_size, "eos_id": eos_id,
        "dtype": spool.dtype.name, "has_mask": spool.has_mask, "block_rows": block_rows, "files": files,
        **asdict(report), **further,
    }  # fmt: skip
    write_atomic(folder / INDEX, json.dumps(index, indent=1))  # last: a folder without it holds no rows


def _fill_file(
    path: Path, flat: np.ndarray, order: np.ndarray, starts: np.ndarray, offsets: np.ndarray, seq_len: int,
    block_rows: int, *, empty: int,
) -> list[int]:  # fmt: skip
    """Writes the rows whose pieces `offsets` [rows + 1] names, some blocks at a time; returns the blocks' checksums."""
    # Whole blocks at a time, because a checksum is that of a block.
    checksums, rows_at_once = list[int](), max(1, ROWS_AT_ONCE // block_rows) * block_rows
    with open(path, "wb") as file:
        for first in range(0, len(offsets) - 1, rows_at_once):
            block = offsets[first : first + rows_at_once + 1]
            out = np.full((len(block) - 1, seq_len), empty, dtype=flat.dtype)
            chosen = order[block[0] : block[-1]]
            begins, ends = starts[chosen].tolist(), starts[chosen + 1].tolist()
            piece = 0
            for row, count in zip(out, np.diff(block).tolist(), strict=True):
                at = 0
                for begin, end in zip(begins[piece : piece + count], ends[piece : piece + count], strict=True):
                    row[at : at + end - begin] = flat[begin:end]
                    at += end - begin
                piece += count
            file.write(out.tobytes())
            checksums += [zlib.crc32(out[at : at + block_rows].tobytes()) for at in range(0, len(out), block_rows)]
    return checksums
