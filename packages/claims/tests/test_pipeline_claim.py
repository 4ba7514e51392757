"""The bounds are the textbook's, and the measurement runs."""

from dataclasses import replace

import pytest

from modelwright.core.progress import SilentProgress
from modelwright.parallel.pipeline.balance import StageSpan
from modelwright_claims import pipeline_utilisation as claim
from modelwright_claims.claim import Measurement, Setting
from modelwright_claims.judging import judge
from modelwright_claims.pipeline_utilisation import (
    ProbeSize,
    busy_share,
    equal_durations,
    measured_durations,
    order_taken,
)
from modelwright_claims.workbench import Size
from modelwright_plan.bubble import makespan


def span(stage: int, kind: str, seconds: float = 1.0) -> StageSpan:
    return StageSpan(stage=stage, kind=kind, start_s=0.0, end_s=seconds)


def gpipe(num_stages: int, number: int) -> list[list[StageSpan]]:
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


def measurement(
    *, share: float = 0.8, allowed: float = 0.85, step_s: float = 0.6, uneven: float = 0.005
) -> Measurement:
    values = {
        claim.case_name("1F1B", 2, 1): {"measured": 0.5, "allowed": 0.5, "equal": 0.5, "step_s": 1.0},
        claim.case_name("1F1B", 2, 16): {"measured": share, "allowed": allowed, "equal": 0.94, "step_s": step_s},
    }
    samples = {
        f"{name}{suffix}": [(1 + sign * uneven) * of[key] for sign in (-1, 0, 1)]
        for name, of in values.items()
        for key, suffix in claim.SUFFIXES.items()
    }
    return Measurement(samples=samples, conditions={"ranks": "2"})


def test_verdict_asks_for_the_share_for_the_bound_and_for_a_shorter_step():
    met = judge(claim.CLAIM, measurement())
    assert met.kind == "met"
    assert met.figures["time of a step, 1F1B, 16 microbatches over one"].value == pytest.approx(0.6)
    for worse in ({"share": 0.7, "allowed": 0.75}, {"allowed": 0.95}, {"step_s": 1.0}, {"uneven": 0.05}):
        assert judge(claim.CLAIM, measurement(**worse)).kind == "short", worse


def test_times_of_steps_have_to_be_in_the_record():
    found = measurement()
    samples = {name: of for name, of in found.samples.items() if not name.endswith(claim.SUFFIXES["step_s"])}
    lacking = judge(claim.CLAIM, replace(found, samples=samples))
    assert lacking.kind == "not judged"
    assert "1F1B, 2 ranks, 16 microbatches: step, s" in lacking.reason


@pytest.mark.usefixtures("forked_ranks")
def test_quick_measurement(tmp_path, monkeypatch):
    model = Size(model_dim=64, num_layers=4, seq_len=16, batch_rows=4, num_steps=1)
    size = ProbeSize(model=model, vocab_size=64, num_repeats=1)
    monkeypatch.setattr(claim, "probe_size", lambda setting: size)
    monkeypatch.setattr(claim, "microbatch_counts", lambda setting: (1, 4))
    result = judge(claim.CLAIM, claim.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress())))
    theory = {name: figure.value for name, figure in result.figures.items() if name.endswith("theory, equal stages")}
    assert theory["1F1B, 2 ranks, 1 microbatches: theory, equal stages"] == pytest.approx(50)
    assert theory["GPipe, 2 ranks, 4 microbatches: theory, equal stages"] == pytest.approx(80)
    assert theory["interleaved 1F1B, 2 ranks, 4 microbatches: theory, equal stages"] == pytest.approx(100 * 8 / 9)
    assert all(0 < figure.value <= 100 for name, figure in result.figures.items() if name.endswith("measured"))
    for name in theory:
        label = name.removesuffix(": theory, equal stages")
        bound = result.figures[f"{label}: allowed by the measured stage times"].value
        assert result.figures[f"{label}: measured"].value <= bound * 1.001
