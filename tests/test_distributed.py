"""The helper that runs functions on ranks: results, errors, deaths and time limits."""

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch

from distributed import RankError, run_distributed, start_distributed
from modelwright.parallel.mesh import World, join_world


@dataclass(frozen=True)
class Pair:
    rank: int
    total: torch.Tensor


def add(world: World, value: torch.Tensor) -> Pair:
    assert torch.get_num_threads() == 1
    return Pair(world.rank, world.all_reduce_sum(value * (world.rank + 1)))


def fail_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise ValueError("what rank 1 says")
    world.barrier()


def warn(world: World) -> None:
    torch.range(0, 1)  # deprecated


def die_on_rank_1() -> str:
    """Without a process group, which the survivor could lose while it is still connecting."""
    rank = int(os.environ["RANK"])
    print(f"rank {rank} is here", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def wait_for_rank_1_that_dies(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def sleep(world: World) -> None:
    print("going to sleep", flush=True)
    time.sleep(100)


def variables() -> tuple[str | None, int]:
    with join_world(torch.device("cpu")) as world:
        return os.environ.get("RANK"), world.size


def test_results_come_back_by_rank():
    first, second = run_distributed(add, 2, torch.tensor([1.0, 2.0]))
    assert (first.rank, second.rank) == (0, 1)
    assert first.total.tolist() == second.total.tolist() == [3.0, 6.0]


def test_a_function_may_join_the_world_by_itself():
    assert run_distributed(variables, 2, joins_world=False) == [("0", 2), ("1", 2)]
    assert run_distributed(variables, 1, joins_world=False) == [("0", 1)]


def test_the_rank_that_failed_first_is_named_with_its_traceback_and_the_others_are_killed():
    ranks = start_distributed(fail_on_rank_1, 3)
    with pytest.raises(RankError, match=r"(?s)^rank 1 of 3 \([^)]*\):\nTraceback.*in fail_on_rank_1.*what rank 1 says"):
        ranks.results()
    assert not any(map(ranks.is_alive, range(3)))


def test_a_rank_that_was_killed_is_named_before_those_that_lost_it():
    with pytest.raises(RankError, match=r"^rank 1 of 2 \(exit code -9\):"):
        run_distributed(wait_for_rank_1_that_dies, 2)


def test_warnings_are_errors():
    with pytest.raises(RankError, match=r"torch\.range is deprecated"):
        run_distributed(warn, 1)


def test_a_rank_that_was_killed_has_no_result():
    survivor, victim = start_distributed(die_on_rank_1, 2, joins_world=False).wait()
    assert (survivor.code, survivor.result) == (0, "survived")
    assert (victim.code, victim.result, victim.output) == (-signal.SIGKILL, None, "rank 1 is here\n")


def test_ranks_that_take_too_long_are_killed():
    ranks = start_distributed(sleep, 2)
    with pytest.raises(TimeoutError, match=r"(?s)within 5 s\nrank 0 of 2 \(running\):\ngoing to sleep"):
        ranks.results(timeout_s=5)
    assert not any(map(ranks.is_alive, range(2)))
