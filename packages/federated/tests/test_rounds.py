"""Rounds over an in-memory grid: Flower's strategies against their formulas, clients that misbehave, and resuming."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch

from refusals import config_error

pytest.importorskip("flwr")

from federated_peers import (
    SIZE,
    MadeUp,
    MemoryGrid,
    OwnRows,
    from_round_1,
    local_training,
    mean_of,
    own_change,
    server,
    settings,
    trainings,
)
from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.core.records import read_records
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright_federated.server import LOG_FILE, STATE
from modelwright_federated.weights import GlobalWeights

NAMES = ("ann", "ben", "cem", "dia")


class Named:
    """A local training with a name, as `MadeUp` has one."""

    def __init__(self, name: str, local) -> None:
        self.name, self.local = name, local

    def round(self, weights, **more):
        return self.local.round(weights, **more)


def nan(change: np.ndarray) -> np.ndarray:
    return change * np.float32(np.nan)


def huge(change: np.ndarray) -> np.ndarray:
    return change * np.float32(1000)


def fails(change: np.ndarray) -> np.ndarray:
    raise RuntimeError("the patient's name")


def test_one_local_step_of_all_is_one_central_step(tmp_path: Path) -> None:
    """The clients' rows have different numbers of labels; together they are the central batch. Two rounds of SGD."""
    config = settings(max_norm_ratio=100.0)
    central_training = local_training(tmp_path / "central", OwnRows(0, 8))
    start = central = GlobalWeights(tiny_run.tiny_model(), config.lora).read()
    for number in range(2):
        central = central + central_training.round(central, number=number, proximal_mu=0.0).change
    parts = [(0, 3), (3, 8)]
    locals_ = [Named(str(n), local_training(tmp_path / str(n), OwnRows(*rows))) for n, rows in enumerate(parts)]
    federated = server(MemoryGrid(config, locals_), config, tmp_path / "server", start).run()  # pyright: ignore
    assert np.abs(central - start).max() > 1e-3
    assert np.abs(federated - central).max() < 1e-6
    losses = [one["loss"] for one in read_records(tmp_path / "server" / LOG_FILE)]
    assert losses[0] == pytest.approx(np.log(tiny_run.VOCABULARY), rel=0.1)


class NoLabels(OwnRows):
    """Rows in which nothing is learned, as of a client whose answers were all cut off."""

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        rows = super().batch(index)
        return replace(rows, labels_BT=torch.full_like(rows.labels_BT, IGNORED))


def test_a_client_without_a_label_changes_nothing(tmp_path: Path) -> None:
    """Its loss is a sum over nothing, divided by nothing. With SecAgg+ it sends no update at all: test_secure.py."""
    empty = Named("empty", local_training(tmp_path / "empty", NoLabels(0, 3)))
    others = [Named(name, local_training(tmp_path / name, OwnRows(0, 8))) for name in ("ann", "ben")]
    config = settings(max_norm_ratio=100.0, num_rounds=1)
    start = GlobalWeights(tiny_run.tiny_model(), config.lora).read()
    with_it = server(MemoryGrid(config, [empty, *others]), config, tmp_path / "with", start).run()  # pyright: ignore
    without = server(MemoryGrid(config, others), config, tmp_path / "without", start).run()  # pyright: ignore
    assert np.isfinite(with_it).all()
    assert np.abs(without - start).max() > 1e-3
    assert with_it == pytest.approx(without, abs=1e-7)


def test_adamw_at_clients_takes_steps_of_its_rate(tmp_path: Path) -> None:
    """AdamW's first update of each number is its rate, whatever the gradient; the state begins anew in every round."""
    local = local_training(tmp_path, OwnRows(0, 8), optimizer="adamw", learning_rate=0.01)
    start = GlobalWeights(tiny_run.tiny_model(), local.config.lora).read()
    for number in range(2):
        change = local.round(start, number=number, proximal_mu=0.0).change
        assert np.quantile(np.abs(change), 0.9) == pytest.approx(0.01, rel=1e-3)


def test_fedprox_of_flower_pulls_back(tmp_path: Path) -> None:
    """Two steps by hand: the second gradient has mu times the first step added. The server says how strong it is."""
    start = GlobalWeights(tiny_run.tiny_model(), settings().lora).read()

    def change(mu: float, steps: int) -> np.ndarray:
        return (
            local_training(tmp_path / "x", OwnRows(0, 8), local_steps=steps)
            .round(start, number=0, proximal_mu=mu)
            .change
        )

    first, free, pulled = change(0.0, 1), change(0.0, 2), change(0.3, 2)
    assert pulled - free == pytest.approx(-0.5 * 0.3 * first, abs=1e-6)  # 0.5: the learning rate
    for strategy, expected in (("fedprox", 0.3), ("fedavg", 0.0)):
        changes = {"proximal_mu": 0.3} if strategy == "fedprox" else {}
        config, own = settings(num_rounds=1, strategy=strategy, **changes), trainings()
        server(MemoryGrid(config, own), config, tmp_path / strategy).run()
        assert [one.proximal for one in own] == [[expected]] * 4


def test_fedadam_takes_adam_s_steps_and_resumes(tmp_path: Path) -> None:
    """Adam (Kingma and Ba 2015) on the mean changes, with Flower's count of steps, which begins at 2."""
    config = settings(num_rounds=3, strategy="fedadam", server_learning_rate=0.01)
    weights, m, v = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for number in range(3):
        gradient = mean_of(NAMES, number)
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        rate = 0.01 * np.sqrt(1 - 0.99 ** (number + 2)) / (1 - 0.9 ** (number + 2))
        weights = weights + rate * m / (np.sqrt(v) + 1e-3)
    straight = server(MemoryGrid(config, trainings()), config, tmp_path / "straight").run()
    assert straight == pytest.approx(weights, abs=1e-6)
    for num_rounds in (1, 3):
        part = replace(config, num_rounds=num_rounds)
        resumed = server(MemoryGrid(part, trainings()), part, tmp_path / "parts").run()
    assert resumed == pytest.approx(straight, abs=1e-7)
    assert [one["round"] for one in read_records(tmp_path / "parts" / LOG_FILE)] == [0, 1, 2]


def test_bad_updates_are_refused_and_long_ones_scaled(tmp_path: Path) -> None:
    """NaN and a failure count for nothing; 1000 times the usual is scaled down."""
    config = settings(num_rounds=1)
    own = [*trainings(cem=lambda change, _: nan(change), dia=lambda change, _: huge(change))]
    own.append(MadeUp("eve", lambda change, _: fails(change)))
    grid = MemoryGrid(config, own)
    weights = server(grid, config, tmp_path).run()
    ann, ben, dia = (own_change(name, 0).astype(np.float64) for name in ("ann", "ben", "dia"))
    bound = 3.0 * max(np.linalg.norm(ann), np.linalg.norm(ben))  # the median of three, of which the third is huge
    assert weights == pytest.approx((ann + ben + dia * bound / np.linalg.norm(dia)) / 3, abs=1e-6)
    (record,) = read_records(tmp_path / LOG_FILE)
    assert (record["clients"], record["refused"], record["scaled"]) == (["ann", "ben", "dia"], ["5", "cem"], ["dia"])
    (failed,) = (reply for reply in grid.replies if reply.has_error())
    assert "the patient's name" in grid.notes[0]
    assert "the patient's name" not in str(failed.error.reason)


def test_a_local_round_writes_no_checkpoint(tmp_path: Path) -> None:
    """No one would read it, and it is as large as the model."""
    local = local_training(tmp_path, OwnRows(0, 8), local_steps=2)
    local.round(local.weights.read(), number=0, proximal_mu=0.0)
    assert list(tmp_path.rglob("metrics.jsonl"))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_round_goes_on_without_a_client_that_is_lost(tmp_path: Path) -> None:
    config = settings()
    grid = MemoryGrid(config, trainings(), lost=lambda name, number, _: name == "ben" and number == 1)
    weights = server(grid, config, tmp_path).run()
    assert weights == pytest.approx(mean_of(NAMES, 0) + mean_of(["ann", "cem", "dia"], 1), abs=1e-6)
    assert read_records(tmp_path / LOG_FILE)[1]["refused"] == ["2"]


def test_a_single_update_is_bounded_by_the_last_round_of_a_server_that_was_started_again(tmp_path: Path) -> None:
    first = settings(num_rounds=1)
    before = server(MemoryGrid(first, [MadeUp("ann"), MadeUp("dia")]), first, tmp_path).run()
    config = settings(num_rounds=2, min_clients=1)
    own = [MadeUp("ann", lambda change, _: nan(change)), MadeUp("dia", lambda change, _: huge(change))]
    after = server(MemoryGrid(config, own), config, tmp_path).run()
    norm = min(np.linalg.norm(own_change(name, 0)) for name in ("ann", "dia"))
    assert np.linalg.norm(after - before) == pytest.approx(3.0 * norm, rel=1e-5)
    alone = replace(config, num_rounds=1)
    made = server(MemoryGrid(alone, [MadeUp("dia")]), alone, tmp_path / "first")
    with pytest.raises(ModelwrightError, match="a single update came"):
        made.run()
    assert not made.weights.any()


def test_too_few_updates_leave_the_weights_alone(tmp_path: Path) -> None:
    config = settings(min_clients=4)
    weights = server(MemoryGrid(config, trainings(ann=from_round_1(nan))), config, tmp_path).run()
    assert weights == pytest.approx(mean_of(NAMES, 0), abs=1e-6)
    assert "3 clients sent a usable update, 4 are needed" in read_records(tmp_path / LOG_FILE)[1]["error"]


def test_clients_insist_on_their_settings(tmp_path: Path) -> None:
    """A server with others gets no update, keeps its weights, and gives up after five rounds."""
    grid = MemoryGrid(settings(local_steps=3), trainings())
    made = server(grid, settings(num_rounds=9), tmp_path, np.ones(SIZE, np.float32))
    with pytest.raises(ModelwrightError, match="5 rounds in a row gave no update; the last: 0 clients sent"):
        made.run()
    assert made.weights.tolist() == [1.0] * SIZE
    assert "the server has other settings" in grid.notes[0]


def test_a_server_waits_no_longer_than_a_round(tmp_path: Path) -> None:
    config = settings(num_rounds=1, min_clients=5, round_timeout_s=0.3)
    with pytest.raises(ModelwrightError, match="4 clients are connected, 5 are needed"):
        server(MemoryGrid(config, trainings()), config, tmp_path).run()


def test_damaged_states_and_other_noise_are_named(tmp_path: Path) -> None:
    config = settings(num_rounds=1)
    server(MemoryGrid(config, trainings()), config, tmp_path).run()
    noisy = settings(num_rounds=1, clients_per_round=2, privacy={"epsilon": 5.0, "clip_norm": 1.0})
    with config_error("privacy.epsilon"):
        server(MemoryGrid(noisy, trainings()), noisy, tmp_path).run()
    (tmp_path / STATE).write_text("{")
    with pytest.raises(ModelwrightError, match="is damaged"):
        server(MemoryGrid(config, trainings()), config, tmp_path).run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"secure_aggregation": {"enabled": True}}, r"privacy\.clip_norm: secure aggregation needs a bound"),
        ({"privacy": {"epsilon": 1.0}}, "clip_norm: noise hides an update only if"),
        ({"strategy": "fedadam", "privacy": {"epsilon": 1.0, "clip_norm": 1.0}}, "strategy: Flower adds noise"),
        ({"privacy": {"epsilon": 1.0, "clip_norm": 1.0}}, "clients_per_round: the noise is for a fixed number"),
        ({"clients_per_round": 1}, "clients_per_round: 1 is below min_clients, 2"),
        ({"lora": {"r": -1}}, r"r: must not be negative"),
        (
            {"lora": {"r": 4, "aggregation": "fedex"}, "privacy": {"clip_norm": 1.0, "epsilon": 1.0}},
            "secure aggregation and noise hide; set ffa",
        ),
    ],
)
def test_settings_that_do_not_go_together(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)
