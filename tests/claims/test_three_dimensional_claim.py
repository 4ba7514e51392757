"""The claim on three-dimensional parallelism: its layouts, its verdict, and a quick measurement with real processes."""

import pytest

from modelwright.model.config import ModelConfig
from modelwright_claims import three_dimensional_parallelism as claim

MODEL = ModelConfig(
    vocab_size=64, num_layers=2, model_dim=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_dim=64, max_seq_len=256
)  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_layout_uses_all_ranks(num_ranks):
    cases = claim.layouts(num_ranks)
    for layout in cases.values():
        sizes = layout.parallel.axes(num_ranks).values()
        product = 1
        for size in sizes:
            product *= size
        assert product == num_ranks
    assert ("pipeline x data x tensor" in cases) == (num_ranks == 8)


def judge(best: float, num_ranks: int = 8):
    seconds = {claim.BASELINE: [8.0, 9.0, 7.0], "data": [best, best, 100.0]}
    return claim.judge(seconds, MODEL, num_ranks=num_ranks, num_rows=16)


def test_met_at_the_published_ratio_of_medians_and_short_below():
    met = judge(8.0 / 4.3)
    assert met.kind == "met"
    assert met.figures["against layers to devices: data"].value == pytest.approx(4.3)
    assert met.figures["tokens per device per second: data"].value == pytest.approx(16 * 256 / (8.0 / 4.3) / 8)
    assert judge(8.0 / 4.1).kind == "short"
    assert "needs at least 5" in judge(4.0, num_ranks=2).reason
