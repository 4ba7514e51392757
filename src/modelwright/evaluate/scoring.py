"""Log-probabilities that a model gives to token sequences of any length.

Legend: B rows, T tokens, D model width, N predictions.

Splits long sequences into overlapping windows and packs windows into rows. Integer arithmetic only.

A sequence of n + 1 tokens has n predictions; prediction i is of token i + 1 from the tokens up to i.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.core.progress import Progress
from modelwright.data.rows.pack import best_fit
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.ops.tensor_heap import use_tensor_heap


@dataclass(frozen=True)
class Window:
    """Predictions [start, end) of sequence `sequence` run through the model; those from `scored_from` on count."""

    sequence: int
    start: int
    end: int
    scored_from: int

    @property
    def length(self) -> int:
        return self.end - self.start


def cut_windows(sequence: int, num_predictions: int, first: int, *, context: int, stride: int) -> Iterator[Window]:
    """Yields windows of at most `context` tokens in which each prediction from `first` on counts exactly once. A
    prediction sees all tokens before it within `context` in the first window, and at least `context - stride` of them
    in every later one. `1 <= stride <= context`.
    """
    assert 1 <= stride <= context, (stride, context)
    done = first
    while done < num_predictions:
        end = min(num_predictions, max(context, done + stride))
        # The tokens before `done` are context alone: an earlier window has counted their predictions.
        yield Window(sequence, max(0, end - context), end, done)
        done = end


def pack_windows(windows: Sequence[Window], row_len: int) -> list[list[Window]]:
    """Packs windows into rows of at most `row_len` tokens: best fit, longest first. Deterministic; fuller rows come
    first, so that rows of like fill share a batch.
    """
    ordered = sorted(windows, key=lambda w: (-w.length, w.sequence, w.start))
    row_of = best_fit(np.array([window.length for window in ordered], dtype=np.int64), row_len).tolist()
    rows: list[list[Window]] = [[] for _ in range(max(row_of, default=-1) + 1)]
    for window, row in zip(ordered, row_of, strict=True):
        rows[row].append(window)
    return sorted(rows, key=lambda row: -sum(window.length for window in row))


@dataclass(frozen=True)
class Scored:
    """A sequence to score: `ids`, of which `ids[first:]` are predicted and the rest is given (`first >= 1`)."""

    ids: Sequence[int]
    first: int
    mask: np.ndarray | None = None
    """1 for the tokens that count [len(ids)]; None if all from `first` on do."""


@torch.no_grad()
def sequence_nats(
    model: Decoder,
    sequences: Sequence[Scored],
    *,
    context_overlap: float,
    max_context: int,
    batch_tokens: int,
    progress: Progress,
    name: str = "score",
) -> np.ndarray:
    """Scores sequences: returns the negative log-likelihood in nats (float64) of the predicted tokens of each.
    Sequences longer than the model's context, or than `max_context`, go through overlapping windows; short ones share
    rows without seeing each other. Each predicted token counts exactly once. The model is put into evaluation mode.
    """
    use_tensor_heap()
    context = min(model.config.max_seq_len, max_context)
    # Windows overlap by the rest of the context, whose predictions were scored by the window before.
    stride = max(1, round(context * (1.0 - context_overlap)))
    windows = [
        window
        for number, scored in enumerate(sequences)
        for window in cut_windows(number, len(scored.ids) - 1, scored.first - 1, context=context, stride=stride)
    ]
    rows = pack_windows(windows, context)
    rows_per_batch = max(1, batch_tokens // context)
    model.eval()
    nats, done = np.zeros(len(sequences)), 0
    progress.begin(name, sum(window.length for window in windows), "tokens")
    for start in range(0, len(rows), rows_per_batch):
        batch = rows[start : start + rows_per_batch]
        _score_rows(model, sequences, batch, nats)
        done += sum(window.length for row in batch for window in row)
        progress.advance(done)
    progress.end()
    return nats


def _score_rows(model: Decoder, sequences: Sequence[Scored], rows: list[list[Window]], nats: np.ndarray) -> None:
    """Run one batch of rows and add each window's counted predictions to its sequence in `nats`."""
    length = max(sum(window.length for window in row) for row in rows)
    inputs, labels, positions = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(3))
    # Padding has segment -1 and no owner: nothing attends to it, and it is not scored.
    segments = np.full((len(rows), length), -1, dtype=np.int32)
    owner = np.full((len(rows), length), -1, dtype=np.int64)
    for r, row in enumerate(rows):
        at = 0
        for number, window in enumerate(row):
            here = slice(at, at + window.length)
            ids = np.asarray(sequences[window.sequence].ids[window.start : window.end + 1], dtype=np.int64)
            inputs[r, here], labels[r, here] = ids[:-1], ids[1:]
            positions[r, here], segments[r, here] = np.arange(window.length), number
            owner[r, at + window.scored_from - window.start : at + window.length] = window.sequence
            mask = sequences[window.sequence].mask
            if mask is not None:
                owner[r, here][mask[window.start + 1 : window.end + 1] == 0] = -1
            at += window.length
    counted = owner >= 0
    device = next(iter(model.parameters())).device
    attend = packed_attend(_to(segments, device), model.config.windows)
    hidden_BTD = model(_to(inputs, device), _to(positions, device), attend)
    hidden_ND = hidden_BTD[_to(counted, device)]
    # In FP32, by the model's own head (an INT8 head too), a chunk at a time: logits of all tokens would not fit.
    chunks = zip(hidden_ND.split(CHUNK_TOKENS), _to(labels[counted], device).split(CHUNK_TOKENS), strict=True)
    nats_N = torch.cat([F.cross_entropy(model.logits(h).float(), own, reduction="none") for h, own in chunks])
    np.add.at(nats, owner[counted], nats_N.double().cpu().numpy())  # `+=` would count repeated owners once


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
