"""The K largest probabilities of a teacher for every token of the rows that it has seen, as shards on disk.

A row is found by a digest of its tokens and documents, whatever batch it is in, so a second epoch, a resumed run and
held-out rows read what was computed before. Each row is evaluated by itself: what is stored does not depend on the rows
beside it, and a resumed run goes on with the same bits.

Legend: B rows, T tokens, K stored tokens.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from modelwright.core.errors import StorageError, writing
from modelwright.data.rows.batch import TokenBatch
from modelwright.objectives.teacher import TeacherModel

LOG_PROBS, TOKENS = "top_log_probs_BTK", "top_tokens_BTK"
"""The extras of a batch that hold the stored probabilities."""


@dataclass(kw_only=True)
class TeacherCache:
    """Gives batches the teacher's K likeliest tokens at a temperature, and writes those of new rows to `folder`.

    Each rank writes shards of its own and, when it starts, finds those of all ranks. The folder belongs to one teacher,
    one temperature and one K; a shard that is damaged is computed again.
    """

    teacher: TeacherModel
    folder: Path
    temperature: float
    top_k: int
    rank: int = 0
    places: dict[str, tuple[Path, int]] = field(default_factory=dict[str, tuple[Path, int]], init=False)
    """The shard of each row, by digest, and its place there."""

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*.safetensors")):
            self._find_rows(path)

    def extras(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        """The stored probabilities of a batch's rows, [B, T, K] each, on the batch's device."""
        digests = [row_digest(batch, row) for row in range(batch.num_rows)]
        found = {digest: self._read(digest) for digest in digests if digest in self.places}
        missing = [row for row, digest in enumerate(digests) if found.get(digest) is None]
        new = {digests[row]: self._evaluate(batch, row) for row in missing}
        if new:
            self._write(new)
        rows = [new.get(digest) or found[digest] for digest in digests]
        pairs = [row for row in rows if row is not None]
        log_probs_BTK, tokens_BTK = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        device = batch.input_ids_BT.device
        return {LOG_PROBS: log_probs_BTK.to(device), TOKENS: tokens_BTK.to(device, torch.int64)}

    def _evaluate(self, batch: TokenBatch, row: int) -> tuple[Tensor, Tensor]:
        alone = TokenBatch(
            input_ids_BT=batch.input_ids_BT[row : row + 1],
            labels_BT=batch.labels_BT[row : row + 1],
            positions_BT=batch.positions_BT[row : row + 1],
            segments_BT=batch.segments_BT[row : row + 1],
        )
        log_probs_TK, tokens_TK = self.teacher.top_tokens(alone, self.temperature, self.top_k)
        return log_probs_TK.float().cpu(), tokens_TK.int().cpu()

    def _find_rows(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                digests = (file.metadata() or {}).get("rows", "").split()
                shape = file.get_slice(TOKENS).get_shape()
        except (SafetensorError, OSError):
            return
        if shape[0] == len(digests) and shape[2] == self.top_k:
            self.places |= {digest: (path, place) for place, digest in enumerate(digests)}

    def _read(self, digest: str) -> tuple[Tensor, Tensor] | None:
        path, place = self.places[digest]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_slice(LOG_PROBS)[place], file.get_slice(TOKENS)[place]
        except (SafetensorError, OSError):
            return None

    def _write(self, rows: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Write a shard, atomically."""
        name = hashlib.sha256(" ".join(rows).encode()).hexdigest()[:16]
        path = self.folder / f"{self.rank}-{name}.safetensors"
        log_probs_BTK, tokens_BTK = (torch.stack(parts) for parts in zip(*rows.values(), strict=True))
        temporary = path.with_suffix(".tmp")
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                tensors = {LOG_PROBS: log_probs_BTK, TOKENS: tokens_BTK}
                save_file(tensors, temporary, metadata={"rows": " ".join(rows)})
            except SafetensorError as error:
                raise StorageError(f"{path}: cannot be written ({error}); free some space and run again") from error
            os.replace(temporary, path)
        self.places |= {digest: (path, place) for place, digest in enumerate(rows)}


def row_digest(batch: TokenBatch, row: int) -> str:
    """Digest everything that a teacher sees of a row."""
    parts = (batch.input_ids_BT[row], batch.positions_BT[row], batch.segments_BT[row].long())
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
