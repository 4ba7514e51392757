"""Waiting in pipelines: simulated schedules against a simulation tick by tick and against published formulas."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.pipeline.stages import rank_of_stage
from modelwright_plan.bubble import StageTime, bubble_s, bubble_share, order_of_work, simulate
from refusals import config_error

EQUAL = StageTime(forward_s=1.0, input_s=1.0, weight_s=1.0)
LATE_HEAD = [StageTime(forward_s=2, input_s=3, weight_s=1)] * 7 + [StageTime(forward_s=3, input_s=5, weight_s=2)]


def config(pipeline: int, schedule: str, stages: int) -> ParallelConfig:
    return ParallelConfig(pipeline=pipeline, schedule=schedule, stages_per_rank=stages)  # pyright: ignore


def share(parallel: ParallelConfig, count: int, times=None) -> float:
    times = times or [EQUAL] * (parallel.pipeline * parallel.stages_per_rank)
    work = [0.0] * parallel.pipeline
    for rank, time in zip(rank_of_stage(parallel), times, strict=True):
        work[rank] += count * time.total_s
    return bubble_share(bubble=bubble_s(parallel, times, count), work=max(work))


def ticks(parallel: ParallelConfig, times: list[StageTime], count: int) -> int:
    """The length of a step in whole ticks: in each tick every idle rank begins its next action if it can."""
    tables = _tables(parallel, count)
    busy_until, done_at, now = [0] * parallel.pipeline, {}, 0

    def is_done(kind: str, stage: int, microbatch: int) -> bool:
        return done_at.get((kind, stage, microbatch), now + 1) <= now

    def can_begin(kind: str, stage: int, microbatch: int) -> bool:
        if kind == "FORWARD":
            return stage == 0 or is_done("FORWARD", stage - 1, microbatch)
        if kind == "BACKWARD_WEIGHT":
            return is_done("BACKWARD_INPUT", stage, microbatch)
        if stage == len(times) - 1:
            return is_done("FORWARD", stage, microbatch)
        after = ("BACKWARD_INPUT", "FULL_BACKWARD")
        return any(is_done(name, stage + 1, microbatch) for name in after) and is_done("FORWARD", stage, microbatch)

    while any(tables) or max(busy_until) > now:
        for rank, table in enumerate(tables):
            if table and busy_until[rank] <= now and can_begin(*table[0]):
                kind, stage, microbatch = table.pop(0)
                time = times[stage]
                parts = {"FORWARD": time.forward_s, "BACKWARD_INPUT": time.input_s, "BACKWARD_WEIGHT": time.weight_s}
                busy_until[rank] = now + int(parts.get(kind, time.input_s + time.weight_s))
                done_at[kind, stage, microbatch] = busy_until[rank]
        now += 1
    return now


def _tables(parallel: ParallelConfig, count: int) -> list[list[tuple[str, int, int]]]:
    """PyTorch's tables, and 1F1B in its definition: as many forwards as there are stages left, then by turns."""
    pipeline, stages = parallel.pipeline, parallel.stages_per_rank
    if parallel.schedule == "1f1b":
        return [_one_forward_one_backward(rank, pipeline - rank, count) for rank in range(pipeline)]
    kinds = {
        ("interleaved", 2): torch_schedules.ScheduleInterleaved1F1B,
        ("zero_bubble", 1): torch_schedules.ScheduleInterleavedZeroBubble,
        ("zero_bubble", 2): torch_schedules.ScheduleZBVZeroBubble,
    }
    facts = SimpleNamespace(
        n_local_stages=stages,
        pp_group_size=pipeline,
        num_stages=stages * pipeline,
        _n_microbatches=count,
        microbatches_per_round=count // max(1, count // pipeline),
    )
    kind = kinds[parallel.schedule, stages]
    return [
        [
            (action.computation_type.name, action.stage_index, action.microbatch_index)
            for action in kind._calculate_single_rank_operations(facts, rank)  # pyright: ignore
            if action is not None
        ]
        for rank in range(pipeline)
    ]


def _one_forward_one_backward(stage: int, ahead: int, count: int) -> list[tuple[str, int, int]]:
    forwards = [("FORWARD", stage, number) for number in range(count)]
    backwards = [("FULL_BACKWARD", stage, number) for number in range(count)]
    table, forwards = forwards[:ahead], forwards[ahead:]
    while backwards:
        table.append(backwards.pop(0))
        table += forwards[:1]
        forwards = forwards[1:]
    return table


@pytest.mark.parametrize("schedule", [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)])
@pytest.mark.parametrize("count", [4, 8, 12])
def test_simulated_steps_last_as_long_as_tick_by_tick(schedule, count):
    parallel = config(4, *schedule)
    times = LATE_HEAD[-4 * parallel.stages_per_rank :]
    assert simulate(order_of_work(parallel, count), times) == ticks(parallel, times, count)


def test_zero_bubble_waits_less_with_more_microbatches():
    """Two stages on each of 4 ranks, all parts of a step equally long."""
    shares = [share(config(4, "zero_bubble", 2), count) for count in (4, 8, 16)]
    assert shares == pytest.approx([3 / 15, 1.5 / 25.5, 1.5 / 49.5], abs=1e-5)


@pytest.mark.parametrize(("pipeline", "count"), [(2, 2), (4, 8), (8, 16), (4, 100)])
def test_waiting_of_equal_stages_is_the_published_one(pipeline, count):
    """(p - 1) / (m + p - 1) of GPipe and 1F1B, an interleaved schedule's v-th part, a third of it in ZB-H1."""
    plain = (pipeline - 1) / (count + pipeline - 1)
    for schedule in ("gpipe", "1f1b"):
        assert share(config(pipeline, schedule, 1), count) == pytest.approx(plain, abs=1e-5)
    half = [StageTime(forward_s=0.5, input_s=0.5, weight_s=0.5)] * 2 * pipeline
    whole_s = 3 * (pipeline - 1)
    assert bubble_s(config(pipeline, "interleaved", 2), half, count) == pytest.approx(whole_s / 2, abs=1e-3)
    ones = [EQUAL] * pipeline
    assert bubble_s(config(pipeline, "zero_bubble", 1), ones, count) == pytest.approx(whole_s / 3, abs=1e-3)


@pytest.mark.parametrize("schedule", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2)])
def test_many_microbatches_wait_as_if_all_were_simulated(schedule):
    parallel, count = config(4, *schedule), 4 * 25
    times = LATE_HEAD[-4 * parallel.stages_per_rank :]
    work = [0.0] * 4
    for rank, time in zip(rank_of_stage(parallel), times, strict=True):
        work[rank] += count * time.total_s
    expected = simulate(order_of_work(parallel, count), times) - max(work)
    assert bubble_s(parallel, times, count) == pytest.approx(expected, abs=1e-3 * max(work))


def test_few_microbatches_of_1f1b_run_as_gpipe():
    assert order_of_work(config(4, "1f1b", 1), 2) == order_of_work(config(4, "gpipe", 1), 2)
    assert bubble_s(config(1, "1f1b", 1), [EQUAL], 2) == 0.0


def test_a_number_of_microbatches_that_cannot_be_run_is_refused():
    with config_error("gradient_accumulation_steps", match=r"^gradient_accumulation_steps: 7 is not"):
        bubble_s(config(2, "interleaved", 2), [EQUAL] * 4, 7)
