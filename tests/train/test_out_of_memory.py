"""Memory that runs out amid a step: the step is made again in smaller microbatches, on all ranks."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import full_memory
import pytest
import torch

from distributed import run_distributed
from modelwright.core.config import ModelwrightError
from modelwright.core.records import column, read_records
from modelwright.objectives.next_token import NextToken
from modelwright.ops import cpu_kernels
from modelwright.ops.tensor_heap import SWITCH
from modelwright.parallel.mesh import single
from modelwright.train.techniques.out_of_memory import RetryOutOfMemory, is_out_of_memory
from rank_processes import all_well, start_process, wait_for

pytestmark = pytest.mark.slow

MARGIN = (30 if cpu_kernels.are_used_on("cpu") else 70) * 2**20
"""Too little for the whole batch at once, enough for half of it."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")


def limited(folder: Path, margin: int, *, num_microbatches: int = 1, num_rows: int = 32, **environment: str) -> dict:
    arguments = (folder, margin, num_microbatches, num_rows)
    environment["MALLOC_ARENA_MAX"] = "1"
    started = start_process(Path(full_memory.__file__), *arguments, environment=environment)
    (output,) = all_well(wait_for([started]))
    return json.loads(output.splitlines()[-1])


@linux
@pytest.mark.parametrize("heap", ["1", "0"])
def test_a_process_under_a_limit_goes_on_in_smaller_microbatches(tmp_path, heap):
    """RLIMIT_AS, as `ulimit -v` sets it: the allocator's own error, amid forward or backward, with and without the heap
    for tensors.
    """
    found = limited(tmp_path / "limited", MARGIN, **{SWITCH: heap})
    parts = {int(number) for number in found["parts"]}
    assert len(parts) == 1
    assert min(parts) > 1
    assert len(found["parts"]) == 2
    events = read_records(tmp_path / "limited" / "anomalies.jsonl")
    assert [(event["kind"], event["step"]) for event in events if event["kind"] == "out_of_memory"] == [
        ("out_of_memory", 1)
    ]
    asked = limited(tmp_path / "asked", 0, num_microbatches=parts.pop())
    assert asked["parts"] == []
    assert found["losses"] == asked["losses"]
    free = limited(tmp_path / "free", 0)
    assert free["parts"] == []
    assert found["losses"] == pytest.approx(free["losses"], rel=1e-5)


Runs = tuple[Path, list[dict[str, full_memory.Ended]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """The folder, and how each run ended by rank and name."""
    folder = tmp_path_factory.mktemp("full")
    return folder, run_distributed(full_memory.on_ranks, 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one-copy", "copies"])
def test_all_ranks_make_the_step_again(runs, layout):
    """Batch 5 on does not fit on the second rank: 1, 2, then 4 microbatches of its 4 rows."""
    folder, ended = runs
    whole, full = (folder / f"{layout}-{name}" for name in ("whole", "full"))
    losses = [[value for _, value in column(read_records(run / "metrics.jsonl"), "loss")] for run in (whole, full)]
    assert losses[1][:5] == losses[0][:5]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    found = column(read_records(full / "metrics.jsonl"), "num_microbatches")
    assert found == [(step, 4.0) for step in range(6, 13)]
    (event,) = [event for event in read_records(full / "anomalies.jsonl") if event["kind"] == "out_of_memory"]
    assert (event["step"], event["value"]) == (6, 2)
    first, second = (of_rank[full.name].weights for of_rank in ended)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one-copy", "copies"])
def test_a_run_that_goes_on_remembers(runs, layout):
    folder, ended = runs
    once, twice = (ended[1][f"{layout}-{name}"].weights for name in ("full", "twice"))
    assert all(torch.equal(once[name], twice[name]) for name in once)
    found = column(read_records(folder / f"{layout}-twice" / "metrics.jsonl"), "num_microbatches")
    assert found == [(step, 4.0) for step in range(6, 13)]


@pytest.mark.parametrize("layout", ["one-copy", "copies"])
def test_all_ranks_give_up_together(runs, layout):
    for ended in runs[1]:
        assert "microbatch of one row" in ended[f"{layout}-never"].error


class Limited:
    """A runner that fits at most so many rows into memory, and writes down how it was called."""

    microbatches: int
    most_rows: int

    def __init__(self, microbatches: int, most_rows: int) -> None:
        self.microbatches = microbatches
        self.most_rows = most_rows
        self.calls: list[int] = []

    def train(self, batch, loss_fn, *, begin, before_last_backward, num_parts) -> bool:
        self.calls.append(num_parts)
        if -(-batch.num_rows // num_parts) > self.most_rows:
            raise MemoryError
        return True


def retry(microbatches: int = 1, most_rows: int = 100, **more: Any) -> RetryOutOfMemory:
    runner: Any = Limited(microbatches, most_rows)
    return RetryOutOfMemory(**{"runner": runner, "world": single(), **more})


def attempts(retrying: RetryOutOfMemory, num_rows: int, *, group_size: int = 1) -> list[int]:
    """The numbers of microbatches into which a batch of so many rows was cut."""
    runner: Any = retrying.runner
    runner.calls.clear()
    batch: Any = Rows(num_rows, group_size)
    while not retrying.train(batch, lambda output, batch: output, begin=bool, before_last_backward=bool):
        retrying.shrink_microbatches()
    return runner.calls


@dataclass(frozen=True)
class Rows:
    num_rows: int
    group_size: int = 1

    @property
    def num_groups(self) -> int:
        return self.num_rows // self.group_size


def test_the_rows_that_fit_are_remembered_unless_another_number_of_parts_is_asked_for():
    retrying = retry(2, most_rows=3)
    assert attempts(retrying, 12) == [2, 4]
    assert [retrying.num_microbatches(num_rows) for num_rows in (24, 11, 7, 3, 2)] == [8, 4, 3, 2, 2]
    same, other, staged = retry(2), retry(3), retry(2, can_cut=False)
    for one in (same, other, staged):
        one.load_state_dict(retrying.state_dict())
    assert [one.num_microbatches(rows) for one, rows in ((same, 8), (other, 12), (staged, 12))] == [3, 3, 2]
    with pytest.raises(ModelwrightError, match="one row"):
        attempts(retry(1, most_rows=0), 8)


def test_a_group_of_rows_is_never_cut():
    retrying = retry(1, most_rows=5)
    assert attempts(retrying, 12, group_size=4) == [1, 3]
    assert retrying.num_microbatches(8) == 8
    with pytest.raises(ModelwrightError, match="one group of 4 rows"):
        attempts(retry(1, most_rows=3), 12, group_size=4)


def test_a_rank_with_one_row_goes_on_where_another_ones_rows_did_not_fit():
    for fits in (4, 1):
        retrying = retry(world=Agreeing([fits]))
        assert attempts(retrying, 1) == [1]
        retrying.shrink_microbatches()  # the vote said that another rank's did not fit
        assert attempts(retrying, 1) == [1]
        assert retrying.num_microbatches(8) == 8 // fits
    with pytest.raises(ModelwrightError, match="one row"):
        retry(world=Agreeing([0])).shrink_microbatches()


class Agreeing:
    """Ranks of which another one says, in turn, how many rows fitted there."""

    size = 2

    def __init__(self, fitting: list[float]) -> None:
        self.fitting = iter(fitting)

    def maxima(self, own: float) -> list[float]:
        return [max(own, -next(self.fitting))]


def test_a_step_that_cannot_be_made_again_says_why():
    with pytest.raises(ModelwrightError, match="out-of-memory retry is disabled: sends"):
        attempts(retry(1, most_rows=2, blocker=lambda: "sends"), 8)


@dataclass(frozen=True)
class SomeRows:
    """Batches of 8, 7, 8, 6, 5, ... rows."""

    rows: Any
    num_batches_per_epoch: int = 5

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1):
        found = self.rows.batch(index)
        return found.take(torch.arange((8, 7, 8, 6, 5)[index % 5]))


@pytest.mark.parametrize("balance", [False, True], ids=["in-order", "balanced"])
def test_memory_that_runs_out_once_with_another_number_of_rows_at_every_step(tiny, tmp_path, balance):
    """Parts of more than three rows do not fit: the first step halves twice, and no later one fails."""
    settings = tiny.settings(eval_every_steps=0, load_balance={"tokens": balance})
    for name, most_rows in {"free": 100, "full": 3}.items():
        objective = tiny.Full(NextToken(SomeRows(tiny.Rows())), 0, 100, most_rows)
        tiny.run(tmp_path / name, settings, objective=objective, heldout=[])
    free, full = (read_records(tmp_path / name / "metrics.jsonl") for name in ("free", "full"))
    assert column(full, "out_of_memory") == [(1, 2.0)]
    assert column(full, "microbatch_rows") == [(1, 2.0)]
    assert [parts for _, parts in column(full, "num_microbatches")] == [4, 4, 4, 3, 3] * 2 + [4, 4]
    losses = [[value for _, value in column(records, "loss")] for records in (free, full)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_parts_of_unequal_numbers_of_rows_make_the_gradient_of_the_whole_batch(tiny, tmp_path):
    weights = []
    for name, most_rows in {"free": 100, "full": 3}.items():
        full = tiny.Full(tiny.Float64Objective(SomeRows(tiny.Rows())), 0, 100, most_rows)
        model = tiny.tiny_model(torch.float64)
        settings = tiny.settings(eval_every_steps=0)
        tiny.run(tmp_path / name, settings, objective=full, model=model, heldout=[])
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layout", ["one-copy", "copies"])
def test_nothing_is_said_where_a_step_can_be_made_again(runs, layout):
    for ended in runs[1]:
        assert ended[f"{layout}-full"].notes == []


@pytest.mark.parametrize(
    ("layout", "why"),
    {"overlap": "gradient_sync.overlap, which", "tensor": r"the layout \(parallel: tensor 2\)"}.items(),
)
def test_where_no_step_can_be_made_again_the_first_rank_says_so_and_the_error_too(runs, layout, why):
    first, second = (ended[f"{layout}-full"] for ended in runs[1])
    assert second.notes == []
    (note,) = first.notes
    assert re.search(f"out-of-memory retry is disabled: {why}", note)
    errors = [first.error, second.error]
    for error in errors:
        assert error.startswith("out of memory: ")
        assert error.endswith(note)


def test_what_counts_as_out_of_memory():
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
