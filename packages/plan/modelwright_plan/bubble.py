"""Idle time of pipeline ranks in a step: the schedule that training runs, simulated action by action.

The order of work of interleaved and zero-bubble schedules is PyTorch's own table
(`torch.distributed.pipelining.schedules`), the one that `parallel.pipeline` executes. Messages between stages take no
time here: `cluster.axis_seconds` accounts for them. Measured steps are in `parallel.pipeline.balance`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Literal

from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.pipeline.stages import check_microbatches, is_v_shaped, rank_of_stage

Kind = Literal["forward", "loss", "backward", "backward_input", "backward_weight"]
Action = tuple[Kind, int, int]
"""What a rank computes without interruption: kind, stage, microbatch."""

_ROUNDS = 8
"""Rounds of microbatches that are simulated; from then on every further round is taken to last equally long. That is
exact for equal stages; where stages differ by a fifth at random it was at most 1% of a step off."""
_DIGITS = 6
_READ_BY_OWN_RANK = ("loss", "backward_weight")
"""Work that no other rank waits for, and that waits for no other rank."""
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
    """Seconds that the busiest rank waits in one step; 0 without a pipeline. times: of every stage, in order. Raises
    `ConfigError` if the schedule cannot run that many microbatches.
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
    first, round_size = _simulated_microbatches(config, num_microbatches)
    waiting = _waiting(plain, relative, first)
    if first < num_microbatches:
        growth = _waiting(plain, relative, first + round_size) - waiting
        waiting += growth * (num_microbatches - first) / round_size
    return max(0.0, waiting) * unit


def bubble_share(*, bubble: float, work: float) -> float:
    """The share of a step's time in which ranks are idle; (p - 1) / (m + p - 1) for GPipe and 1F1B."""
    return bubble / (bubble + work) if bubble + work else 0.0


def order_of_work(config: ParallelConfig, num_microbatches: int) -> list[list[Action]]:
    """What each rank of the pipeline computes in one step, in order."""
    ranks, count = range(config.pipeline), num_microbatches
    if config.schedule == "1f1b" and count >= config.pipeline:
        return [_one_stage_order(rank, count, warm_up=config.pipeline - rank) for rank in ranks]
    if config.schedule in ("gpipe", "1f1b"):
        return [_one_stage_order(rank, count, warm_up=count) for rank in ranks]
    return [_table_order(config, rank, count) for rank in ranks]


def simulate(order: Sequence[Sequence[Action]], times: Sequence[StageTime]) -> float:
    """Seconds until the last rank is done. times: of every stage, in order."""
    return makespan(order, [[_duration(kind, times[stage]) for kind, stage, _ in actions] for actions in order])


def makespan(order: Sequence[Sequence[Action]], durations: Sequence[Sequence[float]]) -> float:
    """Time until the last rank is done if every rank works in order and starts each piece once its inputs are ready.
    durations: of every piece, in the shape of `order`.
    """
    done: dict[Action, float] = {}
    clocks, positions = [0.0] * len(order), [0] * len(order)
    num_stages, left = 1 + max(stage for actions in order for _, stage, _ in actions), sum(map(len, order))
    while left:
        left_before = left
        for rank, actions in enumerate(order):
            while positions[rank] < len(actions):
                kind, stage, microbatch = actions[positions[rank]]
                start = _start(done, kind, stage, microbatch, num_stages)
                if start is None:
                    break
                clocks[rank] = max(clocks[rank], start) + durations[rank][positions[rank]]
                if kind not in _READ_BY_OWN_RANK:
                    done["forward" if kind == "forward" else "backward", stage, microbatch] = clocks[rank]
                positions[rank] += 1
                left -= 1
        assert left < left_before, "the schedule waits for itself"
    return max(clocks)


def _start(done: dict[Action, float], kind: Kind, stage: int, microbatch: int, num_stages: int) -> float | None:
    """When the inputs of an action are ready; None if not known yet."""
    if kind in _READ_BY_OWN_RANK:
        return 0.0  # its rank has computed what it reads
    if kind == "forward":
        return done.get(("forward", stage - 1, microbatch)) if stage else 0.0
    if stage == num_stages - 1:
        return done.get(("forward", stage, microbatch))
    return done.get(("backward", stage + 1, microbatch))


def _duration(kind: Kind, time: StageTime) -> float:
    if kind == "forward":
        return time.forward_s
    if kind == "backward_input":
        return time.input_s
    return time.weight_s if kind == "backward_weight" else time.input_s + time.weight_s


@lru_cache(maxsize=4096)
def _waiting(config: ParallelConfig, times: tuple[StageTime, ...], num_microbatches: int) -> float:
    work = [0.0] * config.pipeline
    for owner, time in zip(rank_of_stage(config), times, strict=True):
        work[owner] += num_microbatches * time.total_s
    return simulate(_order(config, num_microbatches), times) - max(work)


@lru_cache(maxsize=256)
def _order(config: ParallelConfig, num_microbatches: int) -> list[list[Action]]:
    return order_of_work(config, num_microbatches)


def _simulated_microbatches(config: ParallelConfig, num_microbatches: int) -> tuple[int, int]:
    """The number of microbatches to simulate, as a few rounds of the size that the schedule uses; and that size."""
    pipeline = config.pipeline
    if config.schedule in ("gpipe", "1f1b") or is_v_shaped(config):
        first = _ROUNDS * pipeline + num_microbatches % pipeline
        return min(first, num_microbatches), pipeline
    num_rounds = max(1, num_microbatches // pipeline)
    round_size = num_microbatches // num_rounds
    return min(_ROUNDS, num_rounds) * round_size, round_size


def _one_stage_order(rank: int, num_microbatches: int, *, warm_up: int) -> list[Action]:
    """`warm_up` forwards, then backwards and forwards alternating."""
    order: list[Action] = [("forward", rank, number) for number in range(warm_up)]
    for number in range(num_microbatches):
        order.append(("backward", rank, number))
        if warm_up + number < num_microbatches:
            order.append(("forward", rank, warm_up + number))
    return order


def _table_order(config: ParallelConfig, rank: int, num_microbatches: int) -> list[Action]:
    """PyTorch's table of one rank, which its classes compute from these facts alone."""
    facts = SimpleNamespace(
        n_local_stages=config.stages_per_rank,
        pp_group_size=config.pipeline,
        num_stages=config.stages_per_rank * config.pipeline,
        _n_microbatches=num_microbatches,
        microbatches_per_round=num_microbatches // max(1, num_microbatches // config.pipeline),
    )
    table = _schedule_class(config)._calculate_single_rank_operations(facts, rank)  # pyright: ignore
    return [
        (_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in table
        if action is not None
    ]


def _schedule_class(config: ParallelConfig) -> type:
    """PyTorch's class of a schedule with tables."""
    from torch.distributed.pipelining import schedules  # imports TorchDynamo, which takes 0.5 s

    if config.schedule == "interleaved":
        return schedules.ScheduleInterleaved1F1B
    return schedules.ScheduleZBVZeroBubble if is_v_shaped(config) else schedules.ScheduleInterleavedZeroBubble
