"""The verdict of the claim on planned memory from given figures."""

from dataclasses import replace
from typing import Any

import pytest

from modelwright.train.memory.trace import Lifetime, MemoryTimeline
from modelwright_claims.claim import Measurement, Verdict
from modelwright_claims.judging import judge
from modelwright_claims.memory_probe import Measured
from modelwright_plan.claims import planned_memory
from modelwright_plan.claims.planned_memory import Case, Pair

CASE = Case(model=planned_memory.base(), rows=1, train={})


def measured(peak: int, flops: float = 3.0, step_s: float = 1.0) -> Measured:
    return Measured(rank=0, peak_bytes=peak, states_bytes=100, step_s=step_s, flops=flops)


def following(num_tensors: int) -> MemoryTimeline:
    """Tensors of 640 bytes that follow each other: one place serves them all."""
    tensors = [Lifetime(num_bytes=640, birth=t, death=t + 1, kind="temporary") for t in range(num_tensors)]
    return MemoryTimeline(lifetimes=tuple(tensors), length=num_tensors)


def measurement(
    *,
    peaks: tuple[int, int] = (600, 601),
    flops: float = 3.3,
    predicted: int = 950,
    planned: int = 580,
    num_tensors: int = 200,
    on_disk=None,
) -> Measurement:
    pair = Pair(
        before=[measured(1100), measured(1101)],
        after=[measured(peak, step_s=1.2) for peak in peaks],
        on_disk=[measured(550, step_s=1.5)] * 2 if on_disk is None else on_disk,
        mapped=measured(1000),
        mapped_after=measured(600, flops),
        moved_bytes=2**20 if on_disk is None else 0,
        step=following(500),
        planned_step=following(num_tensors),
        accumulated={number: following(number * num_tensors) for number in planned_memory.MICROBATCHES},
        planned_bytes=planned,
    )
    return planned_memory.measurement({"a": predicted}, {"a": 1000}, pair, CASE, large={})


def judged(**values: Any) -> Verdict:
    return judge(planned_memory.CLAIM, measurement(**values))


def test_met_only_when_prediction_saving_compute_and_reuse_are():
    met = judged()
    assert met.kind == "met"
    assert met.figures["bytes reused by the executed plan"].value == 99.5
    assert met.figures["bytes reused in an arena as configured"].value == pytest.approx(99.8)
    assert met.figures["peak saved by the plan"].value == pytest.approx(100 * 5 / 11, abs=0.1)
    assert round(met.figures["more FLOPs"].value) == 10
    assert round(met.figures["training's heap above one without gaps"].value) == 10
    assert round(met.figures["the planned step's heap above one without gaps"].value) == 0
    assert measurement().samples[planned_memory.MEMORY_ERRORS] == pytest.approx([-5.0, -3.41, -3.33], abs=0.01)
    short_plans: list[dict[str, Any]] = [{"peaks": (800, 801)}, {"peaks": (740, 800)}, {"planned": 530}]
    others: list[dict[str, Any]] = [{"flops": 3.7}, {"predicted": 880}, {"num_tensors": 100}]
    for worse in short_plans + others:
        assert judged(**worse).kind == "short", worse


def test_the_reuse_is_that_of_the_plan_and_not_of_the_step_as_configured():
    short = judged(num_tensors=100)
    assert short.figures["bytes reused in an arena as configured"].value > planned_memory.REUSE_TARGET
    assert short.reason.startswith("bytes reused by the executed plan 99% (exact), not at least 99.3%")
    assert short.figures["bytes reused by the plan, 16 microbatches"].value == pytest.approx(100 - 100 / 1600)


def test_the_arena_of_the_executed_plan_has_to_be_in_the_record():
    found = measurement()
    samples = {name: of for name, of in found.samples.items() if name != "bytes of the arena, planned"}
    lacking = judge(planned_memory.CLAIM, replace(found, samples=samples))
    assert lacking.line.startswith("not judged: the record lacks samples 'bytes of the arena, planned'")


def test_a_disk_that_the_plan_does_not_use_has_no_figures():
    used = judged()
    assert used.figures["time of a step planned with a disk"].value == 1.5
    assert "disk takes 50% less at 1.50x the time" in used.reason
    unused = judged(on_disk=[])
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
