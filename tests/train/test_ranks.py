"""One and two real processes, which share weights or keep copies, one to four microbatches, ragged batches: one and the
same training."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from modelwright.core.records import column, read_records
from tolerances import TOLERANCES

EXACT = {"rtol": 1e-11, "atol": 1e-13}
LOSS = TOLERANCES["fp32_loss"]


@pytest.fixture(scope="module")
def two_ranks(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    stop_after(tiny, folder / "moved", 4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen([sys.executable, tiny.__file__, "ranks", str(folder)], env={**shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    return folder


def stop_after(tiny, folder, step):
    """A single process that leaves a checkpoint at `step` and no later one."""
    tiny.run(folder, tiny.settings(keep_last=20))
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


@pytest.mark.parametrize("case", ["1", "2", "4", "copies"])
def test_losses_equal_those_of_one_process(tiny, two_ranks, tmp_path, case):
    tiny.run(tmp_path, tiny.settings(num_steps=6))
    for metric in ("loss", "heldout_loss", "num_tokens"):
        single, ranks = (
            torch.tensor(column(read_records(path / "metrics.jsonl"), metric))
            for path in (tmp_path, two_ranks / f"fp32-{case}")
        )
        torch.testing.assert_close(ranks, single, **LOSS)


@pytest.mark.parametrize("case", ["1", "2", "4", "copies"])
def test_weights_are_exact_in_float64(tiny, two_ranks, tmp_path, case):
    model = tiny.run_in_float64(tmp_path, tiny.settings(num_steps=6))
    ranks = [load_file(two_ranks / f"fp64-{case}" / f"rank{rank}.safetensors") for rank in range(2)]
    for name, weight in model.state_dict().items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], weight, **EXACT)


def test_bytes_sent_are_those_of_the_gradients(tiny, two_ranks):
    """Where the processes keep copies, beside sums of a few values: on one copy there is nothing else to send."""
    gradient_bytes, small = 4 * tiny.SHAPE.num_parameters, 16 * 1024
    shared, copied = (
        column(read_records(two_ranks / f"fp32-{case}" / "metrics.jsonl"), "bytes_sent") for case in ("1", "copies")
    )
    assert 0 < shared[0][1] < small
    assert gradient_bytes < copied[0][1] < 1.05 * gradient_bytes + small
    assert shared[1][1] - shared[0][1] < small
    assert gradient_bytes < copied[1][1] - copied[0][1] < 1.05 * gradient_bytes + small


def test_checkpoint_of_one_process_goes_on_with_two_ranks_and_four_microbatches(tiny, two_ranks, tmp_path):
    tiny.run(tmp_path)
    single, moved = (
        torch.tensor(column(read_records(path / "metrics.jsonl"), "loss")) for path in (tmp_path, two_ranks / "moved")
    )
    assert torch.equal(single[:4], moved[:4])
    torch.testing.assert_close(moved, single, **LOSS)
