"""A model and rows that the tests of tensor and context parallelism share among three ranks."""

import torch
from torch import Tensor

from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import Mesh
from modelwright.parallel.tensor_parallel import shard_layers
from tiny_decoder import make_decoder

RANKS = 3
ROW_LEN = 36
VOCABULARY = 68
"""Not a multiple of the ranks."""
Results = dict[str, Tensor]


def model(*, tied: bool = True, num_kv_heads: int = 3) -> Decoder:
    """Return a model with six query heads for three ranks; in float64, where a wrong gradient cannot hide."""
    return make_decoder(
        num_heads=6, num_kv_heads=num_kv_heads, vocab_size=VOCABULARY, tie_embeddings=tied
    ).double()  # fmt: skip


def rows() -> TokenBatch:
    """Two rows of documents of several lengths, one of them with padding; about a quarter of the labels ignored."""
    generator = torch.Generator().manual_seed(5)
    segments = torch.zeros(2, ROW_LEN, dtype=torch.int32)
    segments[0, 11:], segments[1, 3:], segments[1, 30:] = 1, 1, -1
    starts = torch.zeros(2, ROW_LEN, dtype=torch.int64)
    starts[0, 11:], starts[1, 3:], starts[1, 30:] = 11, 3, 30
    labels = torch.randint(VOCABULARY, (2, ROW_LEN), generator=generator)
    labels[torch.rand(2, ROW_LEN, generator=generator) < 0.25] = IGNORED
    return TokenBatch(
        input_ids_BT=torch.randint(VOCABULARY, (2, ROW_LEN), generator=generator),
        labels_BT=labels,
        positions_BT=torch.arange(ROW_LEN) - starts,
        segments_BT=segments,
    )


def shard(model: Decoder, mesh: Mesh, *, sequence_parallel: bool = True) -> Decoder:
    assert mesh.devices is not None
    return shard_layers(model, mesh.devices["tensor"], sequence_parallel=sequence_parallel)
