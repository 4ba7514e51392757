"""The bounds are the textbook's, and the measurement runs."""

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.parallel.pipeline.bubble import makespan
from modelwright.parallel.pipeline.trace import Span
from modelwright_claims import pipeline_utilisation as claim
from modelwright_claims.claim import Setting
from modelwright_claims.pipeline_probe import ProbeSize
from modelwright_claims.pipeline_replay import busy_share, equal_durations, measured_durations, order_taken
from modelwright_claims.workbench import Size


def span(stage: int, kind: str, seconds: float = 1.0) -> Span:
    return Span(stage=stage, kind=kind, start_s=0.0, end_s=seconds)


def gpipe(num_stages: int, number: int) -> list[list[Span]]:
    ranks = [[span(stage, "forward")] * number + [span(stage, "backward")] * number for stage in range(num_stages)]
    ranks[-1] = [*ranks[-1][:number], *[span(num_stages - 1, "loss")] * number, *ranks[-1][number:]]
    return ranks


@pytest.mark.parametrize(("num_stages", "number"), [(2, 1), (2, 4), (4, 1), (4, 16), (3, 5)])
def test_gpipe_is_busy_as_its_paper_says(num_stages, number):
    spans = gpipe(num_stages, number)
    assert busy_share(spans, equal_durations(spans)) == pytest.approx(number / (number + num_stages - 1))


def test_weight_passes_fill_the_bubble():
    last = [span(1, kind) for kind in ("forward", "loss", "backward_input", "backward_weight")]
    spans = [[span(0, "forward"), span(0, "backward_input"), span(0, "backward_weight")], last]
    assert makespan(order_taken(spans), equal_durations(spans)) == 5
    assert busy_share(spans, equal_durations(spans)) == 3 / 5


def test_slow_stage_bounds_the_others():
    spans = gpipe(2, 2)
    durations = measured_durations(spans)
    durations[1] = [3 * seconds for seconds in durations[1]]
    assert makespan(order_taken(spans), durations) == 1 + 6 + 6 + 6 + 1
    assert busy_share(spans, durations) == (4.0 + 18.0) / 2 / 20.0


def test_share_is_busy_time_over_the_whole_step():
    ranks = [
        {"start": 10.0, "end": 14.0, "spans": [vars(s) for s in rank]}
        for rank in (
            [span(0, "forward"), span(0, "backward")],
            [span(1, "forward"), span(1, "loss"), span(1, "backward")],
        )
    ]
    ranks[1]["end"] = 15.0
    shares = claim.step_shares(ranks)
    assert shares["measured"] == (2 + 3) / 2 / 5
    assert shares["equal"] == 0.5


def test_verdict_asks_for_the_share_and_for_the_bound():
    model = Size(model_dim=64, num_layers=4, seq_len=8, batch_rows=16, num_steps=1)
    size = ProbeSize(model=model, vocab_size=64, num_repeats=1)

    def verdict(share: float, allowed: float) -> str:
        low = {"measured": 0.5, "allowed": 0.5, "equal": 0.5, "step_s": 1.0}
        shares = {claim.case_name("1F1B", 2, 1): low}
        shares[claim.case_name("1F1B", 2, 16)] = {**low, "measured": share, "allowed": allowed}
        return claim.judge(shares, {name: [0.5] for name in shares}, size, (1, 16), [2]).kind

    assert verdict(0.8, 0.85) == "met"
    assert verdict(0.7, 0.75) == "short"
    assert verdict(0.8, 0.95) == "short"


def test_quick_measurement(tmp_path, monkeypatch):
    model = Size(model_dim=64, num_layers=4, seq_len=16, batch_rows=4, num_steps=1)
    size = ProbeSize(model=model, vocab_size=64, num_repeats=1)
    monkeypatch.setattr(claim, "probe_size", lambda setting: size)
    monkeypatch.setattr(claim, "microbatch_counts", lambda setting: (1, 4))
    result = claim.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    theory = {name: figure.value for name, figure in result.figures.items() if name.endswith("theory, equal stages")}
    assert theory["1F1B, 2 ranks, 1 microbatches: theory, equal stages"] == pytest.approx(50)
    assert theory["GPipe, 2 ranks, 4 microbatches: theory, equal stages"] == pytest.approx(80)
    assert theory["interleaved 1F1B, 2 ranks, 4 microbatches: theory, equal stages"] == pytest.approx(100 * 8 / 9)
    assert all(0 < figure.value <= 100 for name, figure in result.figures.items() if name.endswith("measured"))
    for name in theory:
        label = name.removesuffix(": theory, equal stages")
        bound = result.figures[f"{label}: allowed by the measured stage times"].value
        assert result.figures[f"{label}: measured"].value <= bound * 1.001
