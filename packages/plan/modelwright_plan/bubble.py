"""Idle time of pipeline ranks in a step: the schedule that training runs, simulated action by action.

The order of work of interleaved and zero-bubble schedules is PyTorch's own table
(`torch.distributed.pipelining.schedules`), the one that `parallel.pipeline` executes. Messages between stages take no
time here: `cluster.axis_seconds` accounts for them. Measured steps are in `parallel.pipeline.balance`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from modelwright.parallel.mesh import ParallelConfig
from modelwright.parallel.pipeline.stages import check_microbatches, is_v_shaped, rank_of_stage

Kind = Literal["forward", "loss", "backward", "backward_input", "backward_weight"]
Action = tuple[Kind, int, int]
"""A piece of work that a rank computes without interruption: kind, stage, microbatch."""

_ROUNDS = 8
"""Rounds of microbatches that are simulated; from then on every further round is taken to last equally long. That is
exact for equal stages; where stages differ by a fifth at random it was at most 1% of a step off."""
_DIGITS = 6
_READ_BY_OWN_RANK = ("loss", "backward_weight")
"""Work that does not wait for other ranks and that no other rank waits for."""
_KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Seconds of one microbatch in one stage. input_s: backward to the stage's input, including recomputation;
    weight_s: gradients of the stage's weights.
    """

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s


def bubble_s(config: ParallelConfig, times: Sequence[StageTime], num_microbatches: int) -> float:
    """Computes the seconds that the busiest rank waits in one step; 0 without a pipeline. times: times of every stage,
    in order. Raises `ConfigError` if the schedule cannot run that many microbatches.
    """
    check_microbatches(config, num_microbatches)
    unit = max(time.total_s for time in times)
    if config.pipeline == 1 or not unit:
        return 0.0
    # In units of the longest stage, layouts that differ only in the size of a microbatch share a simulation.
    relative = tuple(
        StageTime(
            forward_s=round(time.forward_s / unit, _DIGITS),
            input_s=round(time.input_s / unit, _DIGITS),
            weight_s=round(time.weight_s / unit, _DIGITS),
        )
        for time in times
    )
    plain = ParallelConfig(pipeline=config.pipeline, schedule=config.schedule, stages_per_rank=config.stages_per_rank)
    # A few rounds of the size that the schedule uses are simulated.
    if config.schedule in ("gpipe", "1f1b") or is_v_shaped(config):
        round_size = config.pipeline
        first = min(_ROUNDS * round_size + num_microbatches % round_size, num_microbatches)
    else:
        num_rounds = max(1, num_microbatches // config.pipeline)
        round_size = num_microbatches // num_rounds
        first = min(_ROUNDS, num_rounds) * round_size
    waiting = _waiting(plain, relative, first)
    if first < num_microbatches:
        growth = _waiting(plain, relative, first + round_size) - waiting
        waiting += growth * (num_microbatches - first) / round_size
    return max(0.0, waiting) * unit


def bubble_share(*, bubble: float, work: float) -> float:
    """Returns the share of a step's time in which ranks are idle; (p - 1) / (m + p - 1) for GPipe and 1F1B."""
    return bubble / (bubble + work) if bubble + work else 0.0


def order_of_work(config: ParallelConfig, num_microbatches: int) -> list[list[Action]]:
    """Returns the work of each rank of the pipeline in one step, in order."""
    ranks, count = range(config.pipeline), num_microbatches
    if config.schedule == "1f1b" and count >= config.pipeline:
        return [_one_stage_order(rank, count, warm_up=config.pipeline - rank) for rank in ranks]
    if config.schedule in ("gpipe", "1f1b"):
        return [_one_stage_order(rank, count, warm_up=count) for rank in ranks]
    # PyTorch's tables, which its classes compute from these facts alone.
    from torch.distributed.pipelining import schedules  # imports TorchDynamo, which takes 0.5 s

    schedule_class = schedules.ScheduleInterleavedZeroBubble
    if config.schedule == "interleaved":
        schedule_class = schedules.ScheduleInterleaved1F1B
    elif is_v_shaped(config):
        schedule_class = schedules.ScheduleZBVZeroBubble
    facts = SimpleNamespace(
        n_local_stages=config.stages_per_rank,
        pp_group_size=config.pipeline,
        num_stages=config.stages_per_rank * config.pipeline,
        _n_microbatches=count,
        microbatches_per_round=count // max(1, count // config.pipeline),
    )
    tables: Any = [schedule_class._calculate_single_rank_operations(facts, rank) for rank in ranks]  # pyright: ignore
    return [
        [
            (_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in table
            if action is not None
        ]
        for table in tables
    ]


def simulate(order: Sequence[Sequence[Action]], times: Sequence[StageTime]) -> float:
    """Computes the seconds until the last rank is done. times: times of every stage, in order."""

    def duration(kind: Kind, time: StageTime) -> float:
        if kind == "forward":
            return time.forward_s
        if kind == "backward_input":
            return time.input_s
        return time.weight_s if kind == "backward_weight" else time.input_s + time.weight_s

    return makespan(order, [[duration(kind, times[stage]) for kind, stage, _ in actions] for actions in order])


def makespan(order: Sequence[Sequence[Action]], durations: Sequence[Sequence[float]]) -> float:
    """Computes the time until the last rank is done if every rank works in order and starts each piece once its inputs
    are ready. durations: time of every piece, in the shape of `order`.
    """
    done: dict[Action, float] = {}
    clocks, positions = [0.0] * len(order), [0] * len(order)
    num_stages, left = 1 + max(stage for actions in order for _, stage, _ in actions), sum(map(len, order))
    while left:
        left_before = left
        for rank, actions in enumerate(order):
            while positions[rank] < len(actions):
                kind, stage, microbatch = actions[positions[rank]]
                if kind in _READ_BY_OWN_RANK or (kind == "forward" and stage == 0):
                    start = 0.0  # its rank has computed its inputs
                elif kind == "forward":
                    start = done.get(("forward", stage - 1, microbatch))
                elif stage == num_stages - 1:
                    start = done.get(("forward", stage, microbatch))
                else:
                    start = done.get(("backward", stage + 1, microbatch))
                if start is None:  # not ready yet
                    break
                clocks[rank] = max(clocks[rank], start) + durations[rank][positions[rank]]
                if kind not in _READ_BY_OWN_RANK:
                    done["forward" if kind == "forward" else "backward", stage, microbatch] = clocks[rank]
                positions[rank] += 1
                left -= 1
        assert left < left_before, "the schedule waits for itself"
    return max(clocks)


@lru_cache(maxsize=4096)
def _waiting(config: ParallelConfig, times: tuple[StageTime, ...], num_microbatches: int) -> float:
    work = [0.0] * config.pipeline
    for owner, time in zip(rank_of_stage(config), times, strict=True):
        work[owner] += num_microbatches * time.total_s
    return simulate(_order(config, num_microbatches), times) - max(work)


@lru_cache(maxsize=256)
def _order(config: ParallelConfig, num_microbatches: int) -> list[list[Action]]:
    return order_of_work(config, num_microbatches)


def _one_stage_order(rank: int, num_microbatches: int, *, warm_up: int) -> list[Action]:
    """Returns `warm_up` forwards, then backwards and forwards alternating."""
    order: list[Action] = [("forward", rank, number) for number in range(warm_up)]
    for number in range(num_microbatches):
        order.append(("backward", rank, number))
        if warm_up + number < num_microbatches:
            order.append(("forward", rank, warm_up + number))
    return order
