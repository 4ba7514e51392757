"""The one message per step: what the ranks tell each other, and how many messages a step takes."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import torch.distributed as dist

from distributed import run_distributed
from modelwright.core.config import ModelwrightError, Stopped
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.interruption import Requests, vote
from modelwright.train.technique import StepInfo, Technique

NO_LOSS = torch.zeros(1, dtype=torch.float64)


def test_one_process_hears_itself() -> None:
    own = Requests(stop=signal.SIGINT, minutes_due=True)
    outcome = vote(single(), NO_LOSS + 2.5, out_of_memory=True, skipped_last=True, own=own)
    assert outcome.sums.tolist() == [2.5]
    assert outcome.out_of_memory
    assert outcome.requests == own


def on_two_ranks(world: World) -> list[Any]:
    second = world.rank == 1
    own = Requests(stop=signal.SIGTERM if second else signal.SIGINT, writer_failed=second)
    losses = torch.tensor([1.0 + world.rank, 0.5], dtype=torch.float64)
    outcome = vote(world, losses, out_of_memory=second, skipped_last=True, own=own)
    with pytest.raises(ModelwrightError, match="1 of 2 ranks skipped the last update"):
        vote(world, losses, out_of_memory=False, skipped_last=second, own=Requests())
    return [outcome.sums.tolist(), outcome.out_of_memory, outcome.requests]


def test_what_one_rank_says_all_ranks_hear() -> None:
    requests = Requests(stop=signal.SIGTERM, writer_failed=True)
    assert run_distributed(on_two_ranks, 2) == [[[3.0, 1.0], True, requests]] * 2


def messages_of_ten_steps(world: World, folder: Path) -> Counter[str]:
    """The messages that steps 2 to 11 made besides those of gradients: sums, which two ranks swap, and collectives."""
    counts: Counter[str] = Counter()
    result: Counter[str] = Counter()
    all_reduce, swap = dist.all_reduce, dist.batch_isend_irecv

    def counted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
        if tensor.dtype == torch.float64:
            counts[str(op)] += 1
        return all_reduce(tensor, op, **more)

    def counted_swap(operations: list[Any]) -> Any:
        counts["swap"] += 1
        return swap(operations)

    def observe(info: StepInfo) -> None:
        if info.step == 1:
            counts.clear()
        if info.step == 11:
            result.update(counts)

    dist.all_reduce, dist.batch_isend_irecv = counted, counted_swap
    try:
        config = tiny_run.settings(num_steps=12, checkpoint_every_steps=0, gradient_sync={"overlap": False})
        counter = tiny_run.always(Technique(name="counter", on_step_end=observe, needs=frozenset()))
        layout = ParallelConfig(shared_memory=False)
        tiny_run.run(folder, config, world=world, parallel=layout, techniques=[counter], heldout=[])
    finally:
        dist.all_reduce, dist.batch_isend_irecv = all_reduce, swap
    return result


def test_a_step_makes_two_small_messages_besides_its_gradients(tmp_path: Path) -> None:
    """The normalizers before the first backward, and the vote; besides, the energy is summed every tenth step. There
    were five: losses, whether memory ran out, whether the gradient is finite and what the trainer asks had messages of
    their own."""
    assert run_distributed(messages_of_ten_steps, 2, tmp_path) == [Counter(swap=2 * 10 + 1)] * 2


def stop_one_rank(world: World, folder: Path) -> tuple[str, int]:
    watching = tiny_run.watching(stop=tiny_run.StopAfter(5)) if world.rank == 1 else []
    with pytest.raises(Stopped) as stopped:
        tiny_run.run(folder, world=world, techniques=watching)
    return str(stopped.value), stopped.value.exit_code


def test_a_stop_of_one_rank_stops_all_after_the_next_step(tmp_path: Path) -> None:
    for text, exit_code in run_distributed(stop_one_rank, 2, tmp_path):
        assert text.startswith("stopped after step 6 of 12")
        assert exit_code == 128 + signal.SIGTERM
