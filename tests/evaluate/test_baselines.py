import gzip
import io
import lzma
from collections import Counter

import numpy as np
import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.evaluate.scoring import EvaluateConfig
from modelwright.evaluate.suite import (
    DISCOUNTS,
    bigram_table,
    compressed_bits,
    compressor_table,
    document_nats,
    gzip_size,
    train_bigram,
    training_pairs,
    xz_size,
)

TEXT = ("The quick brown fox jumps over the lazy dog. " * 30 + "Sphinx of black quartz, judge my vow!\n" * 7).encode()


@pytest.mark.parametrize("size", [0, 1, 30, 300, 4096, 4097, len(TEXT)])
def test_sizes_are_those_of_the_tools(size: int) -> None:
    data = TEXT[:size]
    with io.BytesIO() as target:
        with gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=9, mtime=0) as file:
            file.write(data)
        assert abs(gzip_size(data) - len(target.getvalue())) <= 1
    assert gzip.decompress(gzip.compress(data, 9)) == data
    assert xz_size(data) == len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def test_concatenation_lets_documents_refer_to_each_other(make_document) -> None:
    documents = [make_document(id=str(i), text=TEXT.decode(), kind="code") for i in range(5)]
    table = compressor_table(documents)["code"]
    assert table == compressed_bits([TEXT.decode()] * 5)
    for reading in table.values():
        assert reading["concatenated"] < reading["per_document"] / 2


def naive_probability(pairs: list[tuple[int, int]], v: int, w: int, discount: float, vocab_size: int) -> float:
    """Interpolated Kneser-Ney from its definition."""
    counts, contexts = Counter(pairs), Counter(a for a, _ in pairs)
    followers = len({b for a, b in counts if a == v})
    predecessors = len({a for a, b in counts if b == w}) + 0.5
    unigram = predecessors / (len(counts) + 0.5 * vocab_size)
    if not contexts[v]:
        return unigram
    return (max(counts[v, w] - discount, 0) + discount * followers * unigram) / contexts[v]


def test_bigram_equals_its_definition_and_sums_to_one() -> None:
    rng = np.random.default_rng(0)
    previous, following = rng.integers(0, 9, 300), rng.integers(0, 9, 300) // 2
    bigram = train_bigram([(previous[:100], following[:100]), (previous[100:], following[100:])], vocab_size=12)
    assert bigram.discount in DISCOUNTS
    pairs = list(zip(previous.tolist(), following.tolist(), strict=True))
    grid_v, grid_w = (x.ravel() for x in np.meshgrid(np.arange(12), np.arange(12), indexing="ij"))
    probabilities = np.exp(bigram.log_probs(grid_v, grid_w)).reshape(12, 12)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-12)
    expected = [[naive_probability(pairs, v, w, bigram.discount, 12) for w in range(12)] for v in range(12)]
    np.testing.assert_allclose(probabilities, expected, rtol=1e-12)


def test_bigram_learns_a_chain_and_needs_data() -> None:
    chain = np.tile(np.arange(10), 500)
    bigram = train_bigram([(chain[:-1], chain[1:])], vocab_size=11)
    assert document_nats(bigram, [[1, 2, 3]], start_id=0)[0] < 0.05
    assert document_nats(bigram, [[], [5, 5]], start_id=10).tolist()[0] == 0.0
    with pytest.raises(ValueError, match="train rows"):
        train_bigram([], vocab_size=4)


def make_batch(ids: list[list[int]], labels: list[list[int]]) -> TokenBatch:
    shape = torch.tensor(ids)
    return TokenBatch(
        input_ids_BT=shape,
        labels_BT=torch.tensor(labels),
        positions_BT=torch.zeros_like(shape),
        segments_BT=torch.zeros_like(shape, dtype=torch.int32),
    )


def test_training_pairs_are_the_models_own_predictions() -> None:
    batch = make_batch([[1, 2, 3, 4]], [[2, IGNORED, 4, IGNORED]])
    pairs = list(training_pairs([batch, batch], max_tokens=0))
    assert [(p.tolist(), n.tolist()) for p, n in pairs] == [([1, 3], [2, 4])] * 2
    capped = list(training_pairs([batch, batch], max_tokens=3))
    assert [len(p) for p, _ in capped] == [2, 1]
    assert len(list(training_pairs([batch, batch], max_tokens=2))) == 1


def test_bigram_table_covers_every_byte(tokenizer, make_document) -> None:
    ids = list(TEXT)
    batch = make_batch([ids[:-1]], [ids[1:]])
    documents = [make_document(id="a", text="The lazy fox."), make_document(id="b", text="judge", kind="code")]
    table = bigram_table(
        tokenizer, documents, EvaluateConfig(), train_rows=[batch], vocab_size=259, progress=SilentProgress()
    )
    assert table["train_pairs"] == len(TEXT) - 1
    assert [table["kinds"][kind]["bytes"] for kind in ("prose", "code")] == [13, 5]
    assert 0 < table["kinds"]["prose"]["bits_per_byte"] < 6
