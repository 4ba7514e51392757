"""The claim on three-dimensional parallelism: its layouts, its verdict, and a quick measurement with real processes."""

import pytest

from modelwright_claims import three_dimensional_parallelism as claim
from modelwright_claims.claim import Measurement, Verdict
from modelwright_claims.judging import judge


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


def judged(best: float, num_ranks: int = 8, *, uneven: float = 0.0) -> Verdict:
    samples = {"layers to devices": [8.0, 9.0, 7.0], "data": [best * 8, best * 9, best * 7 * (1 + uneven)]}
    conditions = {"devices": f"{num_ranks} processes of one thread", "tokens a step": 16 * 256}
    return judge(
        claim.CLAIM, Measurement(samples={claim.STEP + name: of for name, of in samples.items()}, conditions=conditions)
    )


def test_met_at_the_published_ratio_and_short_below():
    met = judged(1 / 4.3)
    assert met.kind == "met"
    assert met.figures["against layers to devices: data"].value == pytest.approx(4.3)
    assert met.figures["tokens per device per second: data"].value == pytest.approx(16 * 256 / (8.0 / 4.3) / 8)
    assert judged(1 / 4.1).kind == "short"


def test_the_lower_bound_has_to_reach_the_ratio():
    uneven = judged(1 / 4.6, uneven=0.2)
    assert uneven.figures["against layers to devices: data"].value > claim.TARGET
    assert uneven.kind == "short"


@pytest.mark.parametrize("best", [1.0, 1 / 1.9])
def test_fewer_than_five_devices_cannot_test_it(best):
    verdict = judged(best, num_ranks=2)
    assert verdict.kind == "cannot be tested here"
    assert "4.2x needs at least 5 devices, there were 2" in verdict.reason
    assert judged(1 / 4.3, num_ranks=5).kind == "met"
