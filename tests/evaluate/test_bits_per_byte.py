import math

import numpy as np
import pytest
import torch

from modelwright.core.progress import SilentProgress
from modelwright.evaluate.scoring import (
    EvaluateConfig,
    bootstrap_ratio,
    score_documents,
    select_documents,
    summarize_scores,
)
from modelwright.model.decoder import Decoder


def test_a_model_that_knows_nothing_pays_the_whole_alphabet(model: Decoder, tokenizer, make_document) -> None:
    with torch.no_grad():
        model.embedding.weight.zero_()
    documents = [make_document(id="a", text="grüße " * 20), make_document(id="b", text="x", kind="code")]
    scores = score_documents(model, tokenizer, documents, EvaluateConfig(), progress=SilentProgress())
    assert [score.num_bytes for score in scores] == [160, 1]
    summary = summarize_scores(scores, resamples=10, seed=0)
    assert list(summary) == ["prose", "code"]
    for kind in summary.values():
        assert kind["bits_per_byte"] == pytest.approx(math.log2(259), rel=1e-6)
        assert kind["bits_per_byte_low"] == pytest.approx(kind["bits_per_byte"], rel=1e-6)


def test_selection_is_capped_deterministic_and_independent_of_order(make_document) -> None:
    documents = [make_document(id=f"d{i}", text="ab" * 50) for i in range(40)]
    documents += [make_document(id="empty", text=""), make_document(id="other", text="q", kind="qa")]
    settings = {"kinds": ("prose", "code"), "max_bytes_per_kind": 1000, "seed": 1}
    chosen = select_documents(documents, **settings)
    assert len(chosen) == 10
    assert [d.id for d in select_documents(documents[::-1], **settings)] == [d.id for d in chosen]
    assert [d.id for d in select_documents(documents, **{**settings, "seed": 2})] != [d.id for d in chosen]
    assert len(select_documents(documents, **{**settings, "max_bytes_per_kind": 0})) == 40
    assert len(select_documents(documents, **{**settings, "max_bytes_per_kind": 5})) == 1


def test_bootstrap_interval_has_the_width_of_theory() -> None:
    rng = np.random.default_rng(0)
    values, sizes = rng.normal(2.0, 0.5, 400), np.ones(400)
    low, high = bootstrap_ratio(values, sizes, resamples=2000, seed=0)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.01)
    assert high == pytest.approx(values.mean() + half, abs=0.01)
    assert (low, high) == bootstrap_ratio(values, sizes, resamples=2000, seed=0)
