"""Training on batches by tokens with a curriculum and a mixture that follows held-out losses: the same run after a
kill or a move to other ranks."""

import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch

from distributed import run_distributed
from modelwright.core.config import parse
from modelwright.core.records import column, read_records
from modelwright.data.rows.loader import PackedRows, PlannedLoader, build_loader
from modelwright.data.rows.order import BatchingConfig, MixtureConfig, exponentiated_gradient
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.model.attention import packed_attend
from modelwright.model.hf import save_model
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import World, single
from modelwright.train.frozen_model import stored_row_losses
from modelwright.train.techniques.heldout_mixture import heldout_mixture
from refusals import config_error
from tolerances import TOLERANCES

pytestmark = pytest.mark.slow

NUM_STEPS, EVERY = 12, 3
BATCHING = {
    "curriculum": {"by": "length"},
    "mixture": {"weights": {"even": 1, "noise": 1}, "update": "heldout_loss"},
}
LOSS = TOLERANCES["fp32_loss"]


def packed(folder: Path) -> PackedRows:
    """Two sources, one of which cannot be learned."""
    draw = np.random.default_rng(0)
    sequences = []
    for number in range(300):
        length = int(draw.integers(3, tiny_run.LENGTH))
        if number % 2:
            sequences.append(TokenSequence(draw.integers(2, tiny_run.VOCABULARY, length), None, "noise"))
        else:
            sequences.append(TokenSequence(np.full(length, 2 + number % 5), None, "even"))
    config = PackConfig(seq_len=tiny_run.LENGTH, mode="length_buckets")
    pack(sequences, folder, config, vocab_size=tiny_run.VOCABULARY, eos_id=1)
    return PackedRows(folder)


def run(folder: Path, rows: Path, *, world: World | None = None, stop_after: int = 0) -> list[list[int]]:
    """Train, or resume; returns the rows of each batch that was read, in order."""
    data = PackedRows(rows)
    loader = build_loader(
        data, parse(BatchingConfig, BATCHING), batch_rows=tiny_run.ROWS, by_tokens=True, seed=5,
        num_steps_of=lambda per_epoch: NUM_STEPS, row_losses=lambda: np.zeros(0),
    )  # fmt: skip
    assert isinstance(loader, PlannedLoader)
    read: list[list[int]] = []
    planned = loader._batch

    def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
        read.append([index, *planned(index)[0].tolist()])
        return planned(index)

    loader._batch = batch  # type: ignore[method-assign]
    objective = NextToken(loader)
    heldout = {name: [data.gather(data.source_groups(name)[:8])] for name in data.sources}
    build = partial(
        heldout_mixture, parse(BatchingConfig, BATCHING).mixture, mixture=loader.mixture, objective=objective,
        heldout=heldout, every=EVERY,
    )  # fmt: skip
    techniques = tiny_run.watching(stop=tiny_run.StopAfter(stop_after)) if stop_after else []
    config = tiny_run.settings(checkpoint_every_steps=1, keep_last=30)
    tiny_run.run(
        folder, config, objective=objective, world=world, techniques=[*techniques, build],
        heldout=[data.gather(np.arange(8))],
    )  # fmt: skip
    return read


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return packed(tmp_path_factory.mktemp("rows")).folder


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """The folder of an undisturbed run of one process, and the rows of its batches."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, rows)


def keep_until(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step, as if the run had been killed there."""
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


def resume_on_ranks(world: World, folder: Path, rows: Path) -> list[list[int]]:
    return run(folder, rows, world=world)


def run_and_die(folder: Path, rows: Path, step: int) -> None:
    """Kill the process amid the step after `step`."""
    before = PlannedLoader.batch

    def batch(self, index, **share):
        if index == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(self, index, **share)

    PlannedLoader.batch = batch  # type: ignore[method-assign]
    run(folder, rows)


def test_shares_move_to_the_source_with_the_higher_loss(whole, rows) -> None:
    sources = PackedRows(rows).sources
    first_noise = sources["even"] if next(iter(sources)) == "even" else 0
    is_noise = range(first_noise, first_noise + sources["noise"])
    shares = [sum(row in is_noise for row in batch[1:]) / (len(batch) - 1) for batch in whole[1]]
    assert np.mean(shares[-3:]) > np.mean(shares[:3]) + 0.1


@pytest.mark.parametrize("step", [2, 7])
def test_a_killed_run_ends_with_the_same_bits(whole, rows, tmp_path, step) -> None:
    child = os.fork()
    if child == 0:
        try:
            run_and_die(tmp_path, rows, step)
        finally:
            os._exit(0)  # an error must not go on in a second process of the tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    folder, batches = whole
    read = run(tmp_path, rows)
    assert read == batches[len(batches) - len(read) :]
    first, second = tiny_run.final_weights(folder), tiny_run.final_weights(tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("world_size", "step"), [(2, 5), (4, 7)])
def test_more_ranks_go_on_with_the_same_batches(whole, rows, tmp_path, world_size, step) -> None:
    folder, batches = whole
    run(tmp_path, rows)
    keep_until(tmp_path, step)
    for read in run_distributed(resume_on_ranks, world_size, tmp_path, rows):
        assert read == batches[step:]
    for metric in ("loss", "heldout_loss", "num_tokens"):
        single_rank, ranks = (
            torch.tensor(column(read_records(path / "metrics.jsonl"), metric)) for path in (folder, tmp_path)
        )
        torch.testing.assert_close(ranks, single_rank, **LOSS)


def test_exponentiated_gradient_equals_the_naive_one() -> None:
    shares, excess = np.array([0.5, 0.3, 0.2]), np.array([1.0, -2.0, 3.0])
    grown = [share * np.exp(0.7 * max(0.0, one)) for share, one in zip(shares, excess, strict=True)]
    expected = [0.9 * one / sum(grown) + 0.1 / 3 for one in grown]
    result = exponentiated_gradient(shares, excess, rate=0.7, smoothing=0.1)
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    assert np.isfinite(exponentiated_gradient(shares, 1e4 * excess, rate=1.0, smoothing=0.1)).all()


def test_a_source_without_held_out_rows_is_refused(rows) -> None:
    loader = build_loader(
        PackedRows(rows), parse(BatchingConfig, BATCHING), batch_rows=8, by_tokens=True, seed=5,
        num_steps_of=lambda per_epoch: NUM_STEPS, row_losses=lambda: np.zeros(0),
    )  # fmt: skip
    assert isinstance(loader, PlannedLoader)
    with config_error("batching.mixture.update", match="has no held-out rows to measure its loss on"):
        heldout_mixture(
            MixtureConfig(update="heldout_loss"), None, mixture=loader.mixture, objective=NextToken(loader), heldout={},
            every=3,
        )  # fmt: skip # pyright: ignore[reportArgumentType]
    with config_error("batching.mixture.update", match="acts at evaluations; set eval_every_steps above 0"):
        tiny_run.settings(eval_every_steps=0, batching={"mixture": {"update": "heldout_loss"}})


def test_losses_of_rows_are_measured_once_and_kept(rows, tmp_path) -> None:
    model = tiny_run.tiny_model()
    save_model(model, tmp_path / "model")
    data = PackedRows(rows)
    losses = stored_row_losses(data, tmp_path / "model", tmp_path / "kept", single())
    for row in (0, 17, data.num_rows - 1):
        batch = data.gather(np.array([row]))
        objective = NextToken(None)  # type: ignore[arg-type]
        hidden = model(batch.input_ids_BT, batch.positions_BT, packed_attend(batch.segments_BT))
        naive = objective.losses(hidden, batch, model).losses["loss"] / batch.num_targets
        assert losses[row] == pytest.approx(naive.item(), rel=1e-5)
    (kept,) = (tmp_path / "kept").iterdir()
    changed = kept.stat().st_mtime_ns
    assert np.array_equal(stored_row_losses(data, tmp_path / "model", tmp_path / "kept", single()), losses)
    assert kept.stat().st_mtime_ns == changed
