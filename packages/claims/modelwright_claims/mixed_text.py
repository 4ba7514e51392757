"""A stream of prose, code and garbage for a model that was trained on prose.

The prose is like what the model has seen, as one replays it against forgetting; the code is new; the garbage is what a
stream holds that nobody has cleaned: prose in no order, as in pages made of keywords, and tokens drawn evenly, as in
text that was decoded wrongly. A draw from the seed decides what each place of the stream holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright_claims.workbench import TextKind

PROSE, CODE, SHUFFLED, RANDOM = range(4)
"""What a place of the stream holds."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shares of the rows of a stream; the rest is prose."""

    code: float
    garbage: float = 0.0


@dataclass
class Stream:
    """A `BatchSource` of prose, code and garbage; the row at a place of the stream depends on seed and place alone."""

    sources: Mapping[TextKind, PackedLoader]
    batch_rows: int
    kinds: np.ndarray
    """For each place of the stream."""
    seed: int
    vocab_size: int

    @property
    def num_batches_per_epoch(self) -> int:
        return len(self.kinds) // self.batch_rows

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        share = self.batch_rows // world_size
        first = index * self.batch_rows + rank * share
        before = np.bincount(self.kinds[:first], minlength=4)
        numbers: dict[TextKind, int] = {"code": int(before[CODE]), "prose": int(before[PROSE] + before[SHUFFLED])}
        rows: list[TokenBatch] = []
        for place in range(first, first + share):
            kind = self.kinds[place]
            if kind == RANDOM:
                rows.append(self.random_row(place))
                continue
            source: TextKind = "code" if kind == CODE else "prose"
            loader, number = self.sources[source], numbers[source]
            row = loader.rows.gather(loader.order(number, number + 1))
            rows.append(self.shuffled_row(row, place) if kind == SHUFFLED else row)
            numbers[source] += 1
        return _joined(rows)

    def random_row(self, place: int) -> TokenBatch:
        """Draw tokens evenly from the vocabulary."""
        shape = (1, self.sources["prose"].rows.seq_len)
        return _one_document(torch.randint(self.vocab_size, shape, generator=self.draw(place)))

    def shuffled_row(self, row: TokenBatch, place: int) -> TokenBatch:
        ids_1T = row.input_ids_BT
        return _one_document(ids_1T[:, torch.randperm(ids_1T.shape[1], generator=self.draw(place))])

    def draw(self, place: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, "garbage", place))


def mixed_stream(
    rows: Mapping[TextKind, PackedRows],
    mixture: Mixture,
    *,
    num_steps: int,
    batch_rows: int,
    seed: int,
    vocab_size: int,
) -> Stream:
    """Return the stream of a run: what each place holds, and the order of the rows of each kind, depend on the seed."""
    draw = np.random.Philox(derive_seed(seed, "kinds")).random_raw(num_steps * batch_rows) * 2.0**-64
    kinds = np.full(len(draw), PROSE)
    kinds[draw < mixture.code] = CODE
    kinds[draw >= 1.0 - mixture.garbage] = SHUFFLED
    kinds[draw >= 1.0 - mixture.garbage / 2] = RANDOM
    order = derive_seed(seed, "order")
    sources: dict[TextKind, PackedLoader] = {
        kind: PackedLoader(of_kind, batch_rows=1, seed=order) for kind, of_kind in rows.items()
    }
    return Stream(sources, batch_rows, kinds, seed, vocab_size)


def _one_document(ids_1T: Tensor) -> TokenBatch:
    labels_1T = torch.full_like(ids_1T, IGNORED)
    labels_1T[:, :-1] = ids_1T[:, 1:]
    return TokenBatch(
        input_ids_BT=ids_1T,
        labels_BT=labels_1T,
        positions_BT=torch.arange(ids_1T.shape[1])[None],
        segments_BT=torch.zeros(ids_1T.shape, dtype=torch.int32),
    )


def _joined(rows: Sequence[TokenBatch]) -> TokenBatch:
    return TokenBatch(
        input_ids_BT=torch.cat([row.input_ids_BT for row in rows]),
        labels_BT=torch.cat([row.labels_BT for row in rows]),
        positions_BT=torch.cat([row.positions_BT for row in rows]),
        segments_BT=torch.cat([row.segments_BT for row in rows]),
    )
