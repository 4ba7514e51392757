"""The verdict of the claim on planned memory from given figures."""

from typing import Any

import pytest

from modelwright.memory.lifetimes import Lifetime, Timeline
from modelwright_claims import planned_memory
from modelwright_claims.memory_probe import Measured
from modelwright_claims.planned_memory import Case, Pair

CASE = Case(model=planned_memory.base(), rows=1, train={})


def measured(peak: int, flops: float = 3.0, step_s: float = 1.0) -> Measured:
    return Measured(rank=0, peak_bytes=peak, states_bytes=100, step_s=step_s, flops=flops)


def judge(
    *,
    peak: int = 600,
    flops: float = 3.3,
    predicted: int = 950,
    planned: int = 580,
    num_tensors: int = 200,
    on_disk=None,
):
    """Tensors of 640 bytes that follow each other: one place serves them all."""
    following = [Lifetime(num_bytes=640, birth=t, death=t + 1, kind="temporary") for t in range(num_tensors)]
    step = Timeline(lifetimes=tuple(following), length=num_tensors)
    pair = Pair(
        before=[measured(1100)],
        after=[measured(peak, step_s=1.2)],
        on_disk=[measured(550, step_s=1.5)] if on_disk is None else on_disk,
        without_arena=measured(900),
        in_arena=measured(1010),
        mapped=measured(1000),
        mapped_after=measured(600, flops),
        moved_bytes=2**20 if on_disk is None else 0,
        step=step,
        planned_bytes=planned,
    )
    return planned_memory.judge({"a": predicted}, {"a": 1000}, pair, CASE, large={})


def test_met_only_when_prediction_saving_compute_and_reuse_are():
    met = judge()
    assert met.kind == "met"
    assert met.figures["bytes reused in the planned arena"].value == 99.5
    assert met.figures["peak saved by the plan"].value == pytest.approx(100 * 5 / 11)
    assert round(met.figures["more FLOPs"].value) == 10
    assert round(met.figures["training's heap above one without gaps"].value) == 10
    assert round(met.figures["the planned step's heap above one without gaps"].value) == 50
    assert round(met.figures["the executed arena above one without gaps"].value) == 1
    assert round(met.figures["bytes reused by a real heap"].value, 1) == 99.3
    assert met.samples[planned_memory.MEMORY_ERRORS] == pytest.approx([-5.0, -100 / 30, -100 / 30])
    short_plans: list[dict[str, Any]] = [{"peak": 800}, {"peak": 700}, {"planned": 530}]
    others: list[dict[str, Any]] = [{"flops": 3.7}, {"predicted": 880}, {"num_tensors": 100}]
    for worse in short_plans + others:
        assert judge(**worse).kind == "short", worse


def test_a_disk_that_the_plan_does_not_use_has_no_figures():
    used = judge()
    assert used.figures["time of a step planned with a disk"].value == 1.5
    assert "disk takes 50% less at 1.50x the time" in used.reason
    unused = judge(on_disk=[])
    assert not any(name.endswith("planned with a disk") and "moved" not in name for name in unused.figures)
    assert "disk moves nothing" in unused.reason


def test_configurations_that_can_be_trained():
    cases = planned_memory.configurations()
    assert len(cases) == 11
    assert len({repr((case.model, case.settings)) for case in cases.values()}) == 11


def test_the_published_size_is_put_beside_ours():
    words = planned_memory._large_words({"as configured": 3e12, "lean": 1.1e12}, 4.0)
    assert "3.00 TB as configured and 1.10 TB at the least" in words
    assert "6.9 and 2.7 bytes a parameter" in words
