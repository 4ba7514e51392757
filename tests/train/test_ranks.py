"""One and two real processes, which share weights or keep copies, one to four microbatches, ragged batches: one and the
same training."""

from pathlib import Path

import pytest
import tiny_run
import torch

from distributed import run_distributed
from modelwright.core.records import column, read_records
from modelwright.parallel.mesh import ParallelConfig, World
from modelwright.train.monitors.energy import ENERGY_FILE, read_energy
from tolerances import TOLERANCES

pytestmark = pytest.mark.slow

EXACT = {"rtol": 1e-11, "atol": 1e-13}
LOSS = TOLERANCES["fp32_loss"]
CASES = {
    "1": (1, ParallelConfig()),
    "2": (2, ParallelConfig()),
    "4": (4, ParallelConfig()),
    "copies": (2, ParallelConfig(shared_memory=False)),
}
"""Number of microbatches and layout."""


def train(world: World, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Train every case in FP32 and in FP64; the weights of the latter. Then go on from a checkpoint of one process."""
    weights = {}
    for name, (num_microbatches, parallel) in CASES.items():
        config = tiny_run.settings(gradient_accumulation_steps=num_microbatches, num_steps=6)
        tiny_run.run(folder / f"fp32-{name}", config, world=world, parallel=parallel)
        model = tiny_run.run_in_float64(folder / f"fp64-{name}", config, world=world, parallel=parallel)
        weights[name] = {key: weight.clone() for key, weight in model.state_dict().items()}
    tiny_run.run(folder / "moved", tiny_run.settings(gradient_accumulation_steps=4), world=world)
    return weights


@pytest.fixture(scope="module")
def two_ranks(tiny, tmp_path_factory):
    """The folder, and the weights by rank and case."""
    folder = tmp_path_factory.mktemp("ranks")
    stop_after(tiny, folder / "moved", 4)
    return folder, run_distributed(train, 2, folder)


@pytest.fixture(scope="module")
def one_rank(tiny, tmp_path_factory):
    """The folder of a run of one process in FP32, and the weights of one in FP64."""
    folder = tmp_path_factory.mktemp("one")
    tiny.run(folder, tiny.settings(num_steps=6))
    return folder, tiny.run_in_float64(folder / "fp64", tiny.settings(num_steps=6)).state_dict()


def stop_after(tiny, folder, step):
    """A single process that leaves a checkpoint at `step` and no later one."""
    tiny.run(folder, tiny.settings(keep_last=20))
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_those_of_one_process(one_rank, two_ranks, case):
    for metric in ("loss", "heldout_loss", "num_tokens"):
        single, ranks = (
            torch.tensor(column(read_records(path / "metrics.jsonl"), metric))
            for path in (one_rank[0], two_ranks[0] / f"fp32-{case}")
        )
        torch.testing.assert_close(ranks, single, **LOSS)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_exact_in_float64(one_rank, two_ranks, case):
    first, second = (weights[case] for weights in two_ranks[1])
    for name, weight in one_rank[1].items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, **EXACT)


def test_bytes_sent_are_those_of_the_gradients(tiny, two_ranks):
    """Where the processes keep copies, beside sums of a few values: on one copy there is nothing else to send."""
    gradient_bytes, small = 4 * tiny.SHAPE.num_parameters, 16 * 1024
    shared, copied = (
        column(read_records(two_ranks[0] / f"fp32-{case}" / "metrics.jsonl"), "bytes_sent") for case in ("1", "copies")
    )
    assert 0 < shared[0][1] < small
    assert gradient_bytes < copied[0][1] < 1.05 * gradient_bytes + small
    assert shared[1][1] - shared[0][1] < small
    assert gradient_bytes < copied[1][1] - copied[0][1] < 1.05 * gradient_bytes + small


def test_checkpoint_of_one_process_goes_on_with_two_ranks_and_four_microbatches(tiny, two_ranks, tmp_path):
    tiny.run(tmp_path)
    single, moved = (
        torch.tensor(column(read_records(path / "metrics.jsonl"), "loss"))
        for path in (tmp_path, two_ranks[0] / "moved")
    )
    assert torch.equal(single[:4], moved[:4])
    torch.testing.assert_close(moved, single, **LOSS)


def test_energy_is_that_of_all_processes(one_rank, two_ranks):
    alone, both = (read_energy(path / ENERGY_FILE) for path in (one_rank[0], two_ranks[0] / "fp32-1"))
    assert both[0]["num_tokens"] == alone[0]["num_tokens"]
    assert both[0]["joules"].keys() == alone[0]["joules"].keys()
    assert len(both) == len(alone) == 1
