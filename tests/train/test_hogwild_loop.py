"""THE loop in processes that share weights: the same batches, metrics, checkpoints and (nearly) losses."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from distributed import run_distributed, start_distributed
from modelwright.core.config import ModelwrightError
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import TokenBatch
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import World

pytestmark = pytest.mark.slow

NUM_STEPS, DIE_AT, EVERY, LOST = 60, 33, 20, 3
NEVER = NUM_STEPS


@dataclass(frozen=True)
class Deadly(tiny_run.Rows):
    """Rows of which batch `die_at` or a later one kills the process once there is a checkpoint."""

    die_at: int = NEVER
    checkpoints: Path = Path()

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        if index >= self.die_at and list(self.checkpoints.glob("step-*[0-9]")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(index, rank=rank, world_size=world_size)


def train(world: World, folder: Path, die_at: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Train with shared weights; the last rank dies at batch `die_at`. Returns weights and indices of batches."""
    model = tiny_run.tiny_model()
    rows = Deadly(die_at=die_at if world.rank == world.size - 1 else NEVER, checkpoints=folder / "checkpoints")
    config = tiny_run.settings(
        num_steps=NUM_STEPS, eval_every_steps=EVERY, checkpoint_every_steps=EVERY, async_updates={"mode": "hogwild"}
    )
    try:
        tiny_run.run(folder, config, objective=NextToken(rows), model=model, world=world)
    except ModelwrightError as error:
        print(error, flush=True)
        os._exit(LOST)  # the process group cannot be taken down with a member gone
    return {name: weight.clone() for name, weight in model.state_dict().items()}, rows.calls


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """A run on two processes of which one is killed, and the same command again."""
    folder = tmp_path_factory.mktemp("hogwild")
    exits = start_distributed(train, 2, folder, DIE_AT).wait()
    saved = sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*[0-9]"))
    return folder, exits, saved, run_distributed(train, 2, folder, NEVER)


@pytest.fixture(scope="module")
def synchronous(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("synchronous")
    config = tiny.settings(num_steps=NUM_STEPS, eval_every_steps=EVERY, checkpoint_every_steps=EVERY)
    tiny.run(folder, config)
    return folder


def values(folder: Path, name: str) -> list[tuple[int, float]]:
    return column(read_records(folder / "metrics.jsonl"), name)


def test_one_process_alone_trains_as_the_synchronous_run_to_the_bit(tiny, synchronous, tmp_path):
    config = tiny.settings(
        num_steps=NUM_STEPS, eval_every_steps=EVERY, checkpoint_every_steps=EVERY, async_updates={"mode": "hogwild"}
    )
    tiny.run(tmp_path, config)
    for name in ("loss", "heldout_loss", "learning_rate", "grad_norm", "num_tokens"):
        assert values(tmp_path, name) == values(synchronous, name)
    alone, plain = (load_tree(folder) for folder in (tmp_path, synchronous))
    assert alone.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(alone[name], tensor), name


def load_tree(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, optimizer states among them."""
    last = sorted((folder / "checkpoints").glob(f"step-{NUM_STEPS:08d}"))[0]
    return {
        f"{path.name}/{name}": value for path in last.glob("*.safetensors") for name, value in load_file(path).items()
    }


def test_a_killed_process_ends_the_run_with_its_last_checkpoint_whole(two_processes):
    _, (survivor, victim), saved, _ = two_processes
    assert (survivor.code, victim.code) == (LOST, -9)
    assert "has ended (rank 1)" in survivor.output
    assert saved
    assert saved[-1] in (EVERY, 2 * EVERY)


def test_every_update_is_made_once_and_recorded_in_order(two_processes):
    folder, _, saved, results = two_processes
    assert [step for step, _ in values(folder, "loss")] == list(range(1, NUM_STEPS + 1))
    assert {worker for step, worker in values(folder, "worker")} == {0, 1}
    drawn = [number for _, numbers in results for number in numbers]
    assert sorted(drawn) == list(range(saved[-1], NUM_STEPS))


def test_schedule_and_counts_are_those_of_the_synchronous_run(two_processes, synchronous):
    for name in ("learning_rate", "num_tokens"):
        assert values(two_processes[0], name) == values(synchronous, name)
    assert [step for step, _ in values(two_processes[0], "heldout_loss")] == [20, 40, 60]


def test_processes_end_with_equal_weights_which_the_checkpoint_holds(two_processes):
    folder, _, _, ((first, _), (second, _)) = two_processes
    saved = load_tree(folder)
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert any(torch.equal(weight, value) for key, value in saved.items() if key.endswith(name))


def test_it_learns_more_than_a_run_whose_gradients_are_all_two_updates_late(tiny, two_processes, tmp_path):
    """Two processes make each other's gradients late by at most one update on average; that run is repeatable."""
    late = {"mode": "delayed", "delay_steps": 2}
    config = tiny.settings(num_steps=NUM_STEPS, eval_every_steps=EVERY, checkpoint_every_steps=0, async_updates=late)
    tiny.run(tmp_path, config)
    staleness = [value for step, value in values(two_processes[0], "staleness")]
    assert 0 < sum(staleness) / NUM_STEPS <= 1.1
    assert values(two_processes[0], "heldout_loss")[-1][1] < values(tmp_path, "heldout_loss")[-1][1]


def test_a_synchronous_run_goes_on_from_its_checkpoint(tiny, two_processes):
    folder = two_processes[0]
    tiny.run(folder, tiny.settings(num_steps=NUM_STEPS + EVERY, eval_every_steps=EVERY, checkpoint_every_steps=EVERY))
    losses = dict(values(folder, "heldout_loss"))
    assert losses[NUM_STEPS + EVERY] < losses[NUM_STEPS] + 0.02
