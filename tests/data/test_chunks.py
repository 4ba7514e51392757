"""Chunks that overlap, rows that know their source and their score."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelwright.core.config import ConfigError, DataError, parse
from modelwright.data.document import Document
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import PackConfig, TokenSequence, chunks, pack, row_score, row_source
from refusals import config_error

EOS = 1
CHUNKS = {"long_documents": "chunk", "chunk_overlap": 5, "min_chunk_tokens": 12}


@pytest.mark.parametrize(("length", "expected"), [
    (3, [(0, 3)]), (20, [(0, 20)]), (21, [(0, 20), (9, 21)]), (35, [(0, 20), (15, 35)]),
    (36, [(0, 20), (15, 35), (24, 36)]), (50, [(0, 20), (15, 35), (30, 50)]),
])  # fmt: skip
def test_chunks(length: int, expected: list[tuple[int, int]]) -> None:
    assert list(chunks(length, 20, overlap=5, min_tokens=12)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_chunks_of_any_length(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunk_len = int(rng.integers(3, 60))
    overlap = int(rng.integers(1, chunk_len))
    min_tokens = int(rng.integers(overlap + 1, chunk_len + 1))
    length = int(rng.integers(chunk_len + 1, 400))
    cuts = list(chunks(length, chunk_len, overlap=overlap, min_tokens=min_tokens))
    assert cuts[0][0] == 0
    assert cuts[-1][1] == length
    for (start, end), (later_start, later_end) in pairwise(cuts):
        assert later_start <= end - overlap  # at least the overlap is repeated
        assert start < later_start
        assert end < later_end
    assert all(end - start == chunk_len for start, end in cuts[:-1])
    assert min_tokens <= cuts[-1][1] - cuts[-1][0] <= chunk_len


@pytest.mark.parametrize("mode", ["best_fit", "one_per_row"])
@pytest.mark.parametrize("masked", [False, True])
def test_every_target_counts_once(tmp_path: Path, mode, masked: bool) -> None:
    rng, sequences, number = np.random.default_rng(4), [], 2
    for length in (3, 20, 21, 36, 77, 150):
        ids = np.arange(number, number + length)
        number += length
        sequences.append((ids, (rng.random(length) < 0.5).astype(np.uint8) if masked else None))
    config = PackConfig(seq_len=20, mode=mode, **CHUNKS)
    report = pack(sequences, tmp_path, config, vocab_size=number, eos_id=EOS)

    expected: Counter[tuple[int, int]] = Counter()
    for ids, mask in sequences:
        whole = ids.tolist() if masked else [*ids.tolist(), EOS]
        counted = np.ones(len(whole), dtype=int) if mask is None else mask
        num_seen = 1
        for _, end in chunks(len(whole), 20, overlap=5, min_tokens=12):
            expected.update((whole[at - 1], whole[at]) for at in range(num_seen, end) if counted[at])
            num_seen = end
    found: Counter[tuple[int, int]] = Counter()
    for batch in PackedRows(tmp_path).batches(3):
        counts = batch.labels_BT != IGNORED
        found.update(zip(batch.input_ids_BT[counts].tolist(), batch.labels_BT[counts].tolist(), strict=True))
    assert found == expected
    assert report.num_targets == sum(expected.values())
    assert max(expected.values()) == 1


def test_settings_of_chunks_are_checked() -> None:
    chunked = {"long_documents": "chunk"}
    with config_error("long_documents"):
        parse(PackConfig, {**chunked, "chunk_overlap": 512}, constants=True)
    PackConfig(seq_len=32)  # the settings of chunks do not matter to a run without them


def test_rows_shorter_than_the_shortest_chunk_have_whole_chunks(tmp_path: Path) -> None:
    config = parse(PackConfig, {"long_documents": "chunk", "seq_len": 128, "mode": "one_per_row"})
    pack([(np.arange(2, 302), None)], tmp_path, config, vocab_size=400, eos_id=EOS)
    rows = PackedRows(tmp_path)
    assert rows.group_lengths().tolist() == [128, 128, 128, 128]
    assert rows.gather(np.arange(4)).input_ids_BT[:, 0].tolist() == [2, 80, 158, 175]


@pytest.mark.parametrize("mode", ["best_fit", "one_per_row"])
def test_sources_share_no_row_and_scores_are_means(tmp_path: Path, mode) -> None:
    rng = np.random.default_rng(0)
    names = ["b", "a", "c"]
    sequences = [
        TokenSequence(np.full(rng.integers(2, 30), 2 + number % 3), None, names[number % 3], float(number % 3))
        for number in range(60)
    ]
    pack(sequences, tmp_path, PackConfig(seq_len=32, mode=mode), vocab_size=8, eos_id=EOS)
    rows = PackedRows(tmp_path)
    assert list(rows.sources) == names
    assert sum(rows.sources.values()) == rows.num_rows
    for number, name in enumerate(names):
        batch = rows.gather(rows.source_groups(name))
        real = batch.input_ids_BT[(batch.segments_BT >= 0) & (batch.input_ids_BT != EOS)]
        assert set(real.tolist()) == {2 + number}
        assert np.all(rows.group_scores()[rows.source_groups(name)] == number)


def test_row_lengths_and_narrow_rows(tmp_path: Path) -> None:
    pack([(np.full(length, 3), None) for length in (4, 9, 2, 30)], tmp_path, PackConfig(seq_len=12, mode="one_per_row"),
         vocab_size=8, eos_id=EOS)  # fmt: skip
    rows = PackedRows(tmp_path)
    assert rows.group_lengths().tolist() == [5, 10, 3, 12, 12, 9]
    whole, narrow = rows.gather(np.array([2, 0])), rows.gather(np.array([2, 0]), 5)
    for name in ("input_ids_BT", "labels_BT", "positions_BT", "segments_BT"):
        assert getattr(narrow, name).tolist() == getattr(whole, name)[:, :5].tolist()


def test_scores_and_sources_of_documents() -> None:
    document = Document(id="m.jsonl:3", text="ab " * 500, kind="code", split="train", source="m.jsonl", meta={"q": 2})
    assert [row_source(document, by) for by in ("none", "kind", "source")] == ["", "code", "m.jsonl"]
    assert row_score(document, "") is None
    assert row_score(document, "q") == 2.0
    assert 0 < (row_score(document, "compression_ratio") or 0) < 0.05
    with pytest.raises(DataError, match=r"m\.jsonl:3: the field 'w' is None, not a number"):
        row_score(document, "w")


def test_scores_of_some_sequences_only_are_refused(tmp_path: Path) -> None:
    sequences = [TokenSequence([2, 3], None, "", 1.0), TokenSequence([2, 3])]
    with pytest.raises(ValueError, match="only some of the sequences have a score"):
        pack(sequences, tmp_path, PackConfig(seq_len=8), vocab_size=8, eos_id=EOS)


@pytest.mark.parametrize(("kinds", "problem"), [((), "text_kinds: is empty"), (("qa", "qa"), "names a kind twice")])
def test_kinds_of_text_that_make_no_sense(kinds: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        PackConfig(text_kinds=kinds)
