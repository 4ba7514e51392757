"""The share of tokens for which each head is open: counted on held-out rows, shown in the report."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import PackConfig, pack
from modelwright.model.attention import causal_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.head_selection import decisions_seen
from modelwright.pipeline.report.blocks import Table
from modelwright.pipeline.report.run_data import StageData
from modelwright.pipeline.stages.training import HEAD_SHARES, head_blocks, head_shares

SHAPE = ModelConfig(
    vocab_size=32, num_layers=2, model_dim=16, num_heads=4, num_kv_heads=2, ffn_dim=32, head_dim=8, max_seq_len=16,
    head_budget=0.5, init_std=0.5,
)  # fmt: skip
DOCUMENTS = [[3 + (7 * place + length) % 29 for place in range(length)] for length in (5, 14, 9, 3, 12)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows") / "heldout"
    pack(((ids, None) for ids in DOCUMENTS), folder, PackConfig(seq_len=16), vocab_size=32, eos_id=1)
    return folder


def made(shape: ModelConfig) -> Decoder:
    model = Decoder(shape)
    model.init_weights(5)
    return model


def test_shares_are_those_of_single_documents_without_padding(rows: Path) -> None:
    model = made(SHAPE)
    facts = head_shares(model, rows)[HEAD_SHARES]
    opened: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for batch in PackedRows(rows).batches(8):
        for ids_T, segments_T in zip(batch.input_ids_BT, batch.segments_BT, strict=True):
            for segment in segments_T.unique().tolist():
                document = ids_T[segments_T == segment][None]
                if segment < 0:
                    continue
                with torch.no_grad(), decisions_seen(model, lambda layer, open_BTH: opened[layer].append(open_BTH[0])):
                    model(document, torch.arange(document.shape[1])[None], causal_attend())
    wanted = torch.stack([torch.cat(opened[layer]).double().mean(0) for layer in (0, 1)])
    torch.testing.assert_close(torch.tensor(facts["shares"], dtype=torch.float64), wanted)
    assert facts["num_tokens"] == sum(map(len, opened[0]))
    assert 0 < wanted.mean() < 1
    assert model.training, "the model is left as it was"


def test_nothing_is_measured_without_selection_or_rows(rows: Path, tmp_path: Path) -> None:
    assert head_shares(made(replace(SHAPE, head_budget=1.0)), rows) == {}
    assert head_shares(made(SHAPE), tmp_path / "missing") == {}


def stage(facts: dict[str, Any]) -> StageData:
    return cast(StageData, SimpleNamespace(facts=facts))


def test_the_report_has_a_table_of_them() -> None:
    assert not head_blocks(stage({}))
    (table,) = head_blocks(
        stage({HEAD_SHARES: {"shares": [[1.0, 0.25], [0.0, 0.5]], "num_tokens": 1200, "budget": 0.4}})
    )
    assert isinstance(table, Table)
    assert table.header == ["", "head 0", "head 1", "mean"]
    assert table.rows == [["layer 0", "100%", "25%", "62.5%"], ["layer 1", "0%", "50%", "25.0%"]]
    assert "1,200 held-out tokens" in table.caption
    assert "43.8% on average, with a budget of 40%" in table.caption
    assert "Of 4 heads, 1 are (almost) always open and 1 (almost) never" in table.caption
