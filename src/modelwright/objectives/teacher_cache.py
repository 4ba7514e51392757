"""Cache on disk of a teacher's K largest probabilities for every token of the rows that it has evaluated.

A row is found by a digest of its tokens and documents, whatever batch it is in, so a second epoch, a resumed run and
held-out rows read earlier results. Each row is evaluated alone: results do not depend on the other rows of a batch, and
a resumed run continues with the same bits.

Legend: B rows, T tokens, K stored tokens.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
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
"""Extras of a batch with the stored probabilities."""


@dataclass(kw_only=True)
class TeacherCache:
    """Adds the teacher's K likeliest tokens at a temperature to batches, and writes those of new rows to `folder`.

    Each rank writes its own shards and finds those of all ranks when it starts. The folder belongs to one teacher, one
    temperature and one K; the rows of a damaged shard are computed again.
    """

    teacher: TeacherModel
    folder: Path
    temperature: float
    top_k: int
    rank: int = 0
    places: dict[str, tuple[Path, int]] = field(default_factory=dict[str, tuple[Path, int]], init=False)
    """Shard and place of each row, by digest."""

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    digests = (file.metadata() or {}).get("rows", "").split()
                    shape = file.get_slice(TOKENS).get_shape()
            except (SafetensorError, OSError):
                continue
            if shape[0] == len(digests) and shape[2] == self.top_k:
                self.places |= {digest: (path, place) for place, digest in enumerate(digests)}

    def extras(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        """Returns the probabilities of a batch's rows, [B, T, K] each, on the batch's device."""
        digests = [row_digest(batch, row) for row in range(batch.num_rows)]
        found, new = dict[str, tuple[Tensor, Tensor]](), dict[str, tuple[Tensor, Tensor]]()
        for digest in digests:
            if digest in self.places:
                path, place = self.places[digest]
                with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
                    found[digest] = file.get_slice(LOG_PROBS)[place], file.get_slice(TOKENS)[place]
        for row, digest in enumerate(digests):
            if digest not in found:
                alone = TokenBatch(
                    input_ids_BT=batch.input_ids_BT[row : row + 1],
                    labels_BT=batch.labels_BT[row : row + 1],
                    positions_BT=batch.positions_BT[row : row + 1],
                    segments_BT=batch.segments_BT[row : row + 1],
                )
                log_probs_TK, tokens_TK = self.teacher.top_tokens(alone, self.temperature, self.top_k)
                new[digest] = log_probs_TK.float().cpu(), tokens_TK.int().cpu()
        if new:
            self._write(new)
        rows = found | new
        log_probs_BTK, tokens_BTK = (torch.stack(parts) for parts in zip(*map(rows.__getitem__, digests), strict=True))
        device = batch.input_ids_BT.device
        return {LOG_PROBS: log_probs_BTK.to(device), TOKENS: tokens_BTK.to(device, torch.int64)}

    def _write(self, rows: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Write a shard, atomically."""
        # Named by rank and rows: ranks that share the folder never write the same file
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
    """Digest of all inputs of a teacher for a row; labels do not count."""
    parts = (batch.input_ids_BT[row], batch.positions_BT[row], batch.segments_BT[row].long())
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
