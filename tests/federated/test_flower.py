"""Trainings in Flower federations: in memory, and with real processes, whose result is that of our own transport."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_run

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedProx
from flwr.supercore.task_identity import TaskIdentity

from federated_commands import FEDEX, run_with_rows, train_with_commands
from federated_peers import OwnRows, local_training, own_change
from flower_processes import federation
from modelwright.core.config import parse
from modelwright.core.errors import ConfigError, ModelwrightError
from modelwright.core.records import read_records
from modelwright.federated.aggregate import ClientUpdate
from modelwright.federated.client import Trains
from modelwright.federated.config import FederatedConfig
from modelwright.federated.flower import (
    ARRAYS,
    BoundedFedAvg,
    FlowerClient,
    array_record,
    client_app,
    run_bounded_rounds,
    run_rounds,
    weights_of,
)
from modelwright.federated.server import LOG_FILE
from modelwright.federated.weights import weight_vector
from modelwright.model.hf import load_model
from modelwright.pipeline import flower as flower_apps

SIZE = 300


def settings(**changes) -> FederatedConfig:
    return parse(
        FederatedConfig, {"num_rounds": 2, "local_steps": 1, "min_clients": 2, "round_timeout_s": 60.0, **changes}
    )


class MemoryGrid(Grid):
    """Hands messages to ClientApps in this process, one for each client."""

    def __init__(self, config: FederatedConfig, trains: Mapping[int, Trains]) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # which Flower's processes get first
        self.notes: list[str] = []
        self.replies: list[Message] = []
        self.apps = {
            node: client_app(self.client_of(config, train), self.notes.append) for node, train in trains.items()
        }

    @staticmethod
    def client_of(config: FederatedConfig, train: Trains) -> Callable[[Context], FlowerClient]:
        return lambda context: FlowerClient(config=config, train=train)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
            replies.append(self.apps[node](message, context))
        self.replies += replies
        return replies

    def other_way(self, *arguments, **more):
        """What else a Grid has: strategies use `send_and_receive` alone."""
        raise AssertionError("a strategy talked to its clients in another way")

    run = property(other_way)
    set_run = create_message = push_messages = pull_messages = other_way


def made_up(name: str, change_in: Callable[[np.ndarray], np.ndarray] = lambda change: change) -> Trains:
    """A training whose update follows from the name and the round, with something done to it."""

    def train(weights: np.ndarray, *, number: int, num_steps: int, proximal_mu: float) -> ClientUpdate:
        return ClientUpdate(change_in(own_change(name, number, len(weights))), 2.0)

    return train


def fails(change: np.ndarray) -> np.ndarray:
    raise RuntimeError("the patient's name")


def bounded(config: FederatedConfig, folder: Path) -> BoundedFedAvg:
    return BoundedFedAvg(config, folder, lambda text: None)


def test_one_local_step_of_all_is_one_central_step(tmp_path: Path) -> None:
    """The clients' rows have different numbers of labels; together they are the central batch. Two rounds."""
    start = weight_vector(tiny_run.tiny_model())
    central = start
    for number in range(2):
        local = local_training(tmp_path / "central", OwnRows(0, 8))
        central = central + local.round(central, number=number, num_steps=1, proximal_mu=0.0).change
    config = settings(max_norm_ratio=100.0)
    rows = {node: OwnRows(first, last) for node, (first, last) in enumerate([(0, 3), (3, 8)], start=1)}
    grid = MemoryGrid(config, {node: local_training(tmp_path / str(node), own).round for node, own in rows.items()})
    federated = run_bounded_rounds(grid, bounded(config, tmp_path / "server"), start)
    assert np.abs(central - start).max() > 1e-3
    assert np.abs(federated - central).max() < 1e-6


def test_fedprox_of_flower(tmp_path: Path) -> None:
    """Its strategy says how strong the pull is, and averages by the numbers of labels."""
    config = settings(num_rounds=1, local_steps=2)
    start = weight_vector(tiny_run.tiny_model())
    parts = [local_training(tmp_path / str(node), OwnRows(4 * node, 4 * node + 4)).round for node in range(2)]
    updates = {mu: [train(start, number=0, num_steps=2, proximal_mu=mu) for train in parts] for mu in (0.0, 0.7)}
    expected = {
        mu: start + sum(one.change * one.weight for one in each) / sum(one.weight for one in each)
        for mu, each in updates.items()
    }
    strategy = FedProx(proximal_mu=0.7, fraction_evaluate=0.0)
    result = run_rounds(MemoryGrid(config, dict(enumerate(parts, start=1))), strategy, config, start)
    assert np.abs(expected[0.7] - expected[0.0]).max() > 1e-3
    assert np.abs(result - expected[0.7]).max() < 1e-6


def test_bad_updates_are_refused_and_long_ones_scaled(tmp_path: Path) -> None:
    """NaN, another size, and a failure count for nothing; 1000 times the usual is scaled down."""
    config = settings(num_rounds=1)
    trains = {
        1: made_up("ann"),
        2: made_up("ben"),
        3: made_up("cem", lambda change: change * np.float32(np.nan)),
        4: made_up("dia", lambda change: change * np.float32(1000)),
        5: made_up("eve", fails),
    }
    grid = MemoryGrid(config, trains)
    weights = run_bounded_rounds(grid, bounded(config, tmp_path), np.zeros(SIZE, np.float32))
    ann, ben, dia = (own_change(name, 0, SIZE).astype(np.float64) for name in ("ann", "ben", "dia"))
    bound = 3.0 * max(np.linalg.norm(ann), np.linalg.norm(ben))  # the median of three, of which the third is huge
    assert weights == pytest.approx((ann + ben + dia * bound / np.linalg.norm(dia)) / 3, abs=1e-6)
    (record,) = read_records(tmp_path / LOG_FILE)
    assert record["clients"] == ["1", "2", "4"]
    assert record["refused"] == ["3", "5"]
    assert record["scaled"] == ["4"]
    (failed,) = (reply for reply in grid.replies if reply.has_error())
    assert "the patient's name" in grid.notes[0]
    assert "the patient's name" not in str(failed.error.reason)


def huge(change: np.ndarray) -> np.ndarray:
    return change * np.float32(1000)


def test_of_two_updates_the_shorter_one_bounds_the_other(tmp_path: Path) -> None:
    config = settings(num_rounds=1)
    grid = MemoryGrid(config, {1: made_up("ann"), 2: made_up("ben", fails), 3: made_up("dia", huge)})
    weights = run_bounded_rounds(grid, bounded(config, tmp_path), np.zeros(SIZE, np.float32))
    ann, dia = (own_change(name, 0, SIZE).astype(np.float64) for name in ("ann", "dia"))
    expected = (ann + dia * 3.0 * np.linalg.norm(ann) / np.linalg.norm(dia)) / 2
    assert weights == pytest.approx(expected, abs=1e-6)


def test_a_single_update_is_bounded_by_the_last_round_of_a_server_that_was_started_again(tmp_path: Path) -> None:
    first, zero = settings(num_rounds=1), np.zeros(SIZE, np.float32)
    before = run_bounded_rounds(
        MemoryGrid(first, {1: made_up("ann"), 2: made_up("dia")}), bounded(first, tmp_path), zero
    )
    config = settings(num_rounds=2, min_clients=1)
    grid = MemoryGrid(config, {1: made_up("ann", fails), 2: made_up("dia", huge)})
    after = run_bounded_rounds(grid, bounded(config, tmp_path), zero)
    norm = min(np.linalg.norm(own_change(name, 0, SIZE)) for name in ("ann", "dia"))
    assert np.linalg.norm(after - before) == pytest.approx(3.0 * norm, rel=1e-5)
    alone = MemoryGrid(replace(config, num_rounds=1), {2: made_up("dia")})
    unbounded = bounded(replace(config, num_rounds=1), tmp_path / "first")
    assert run_bounded_rounds(alone, unbounded, zero).tolist() == [0.0] * SIZE
    assert "a single update came" in read_records(tmp_path / "first" / LOG_FILE)[0]["error"]


def test_a_reply_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = settings(num_rounds=1)
    grid = MemoryGrid(config, {1: made_up("ann"), 2: made_up("ben"), 3: made_up("cem")})
    honest = grid.apps[3]

    def shorter(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        reply.content[ARRAYS] = array_record(weights_of(reply.content[ARRAYS])[:-1])
        return reply

    grid.apps[3] = shorter  # pyright: ignore[reportArgumentType]
    weights = run_bounded_rounds(grid, bounded(config, tmp_path), np.zeros(SIZE, np.float32))
    assert weights == pytest.approx((own_change("ann", 0, SIZE) + own_change("ben", 0, SIZE)) / 2, abs=1e-6)
    assert read_records(tmp_path / LOG_FILE)[0]["refused"] == ["3"]


def test_a_server_goes_on_after_the_last_round(tmp_path: Path) -> None:
    trains = {1: made_up("ann"), 2: made_up("ben")}
    zero, config = np.zeros(SIZE, np.float32), settings(num_rounds=3)
    straight = run_bounded_rounds(MemoryGrid(config, trains), bounded(config, tmp_path / "straight"), zero)
    for num_rounds in (1, 3):
        part = replace(config, num_rounds=num_rounds)
        resumed = run_bounded_rounds(MemoryGrid(part, trains), bounded(part, tmp_path / "parts"), zero)
    assert resumed == pytest.approx(straight, abs=1e-6)
    assert [one["round"] for one in read_records(tmp_path / "parts" / LOG_FILE)] == [0, 1, 2]


def test_clients_insist_on_their_settings(tmp_path: Path) -> None:
    """A server with others gets no update, keeps its weights, and gives up after five rounds."""
    grid = MemoryGrid(settings(local_steps=3), {1: made_up("ann"), 2: made_up("ben")})
    other = settings(num_rounds=9)
    strategy = bounded(other, tmp_path)
    with pytest.raises(ModelwrightError, match="5 rounds in a row gave no update; the last: 0 clients gave"):
        run_bounded_rounds(grid, strategy, np.ones(SIZE, np.float32))
    assert strategy.weights.tolist() == [1.0] * SIZE
    assert "the server has other settings" in grid.notes[0]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("secure_sum.enabled", {"secure_sum": {"enabled": True}, "privacy": {"clip_norm": 1.0}}),
        ("privacy.noise_multiplier", {"privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0}}),
    ],
)
def test_what_flower_cannot_keep_is_refused_by_name(tmp_path: Path, name: str, changes: dict) -> None:
    config = settings(**changes)
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}: is not available over Flower"):
        bounded(config, tmp_path)
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}: is not available over Flower"):
        FlowerClient(config=config, train=made_up("ann"))


@pytest.mark.parametrize(("rate", "is_right"), [(0.2, True), (1, True), (True, False), (0.0, False), ("0.2", False)])
def test_a_node_s_rate_is_a_number_above_0(rate: object, is_right: bool) -> None:
    options = {"learning-rate": rate}
    if is_right:
        assert flower_apps._rate(options) == rate
    else:
        with pytest.raises(ConfigError, match="learning-rate must be a number above 0"):
            flower_apps._rate(options)


def test_real_processes_give_what_our_transport_gives(tmp_path: Path) -> None:
    """`flwr run` of the app in docs/federated.md over two nodes; adapters whose aggregate changes frozen weights."""
    base, config, keys = run_with_rows(tmp_path), tmp_path / "federated.yaml", tmp_path / "keys"
    config.write_text(FEDEX)
    keys.write_text(f"ann {'1' * 64}\nben {'2' * 64}\n")
    keys.chmod(0o600)
    train_with_commands(base, config, keys, tmp_path)
    nodes = {
        name: {
            "model": str(base), "rows": str(base), "settings": str(config), "name": name, "learning-rate": 0.2,
            "dir": str(tmp_path / f"flower-{name}"),
        }
        for name in ("ann", "ben")
    }  # fmt: skip
    with federation(tmp_path, nodes) as flower:
        output = flower.run(
            "tuning",
            client="from modelwright.pipeline.flower import client\n\napp = client()\n",
            server="from modelwright.pipeline.flower import server\n\napp = server()\n",
            config={"model": str(base), "settings": str(config), "dir": str(tmp_path / "flower-server")},
        )
    assert "round 2 of 2: 2 clients, update of norm" in output, output
    begin, own, over_flower = (
        weight_vector(load_model(folder))
        for folder in (
            base / "pretrain" / "artifact",
            tmp_path / "server" / "model",
            tmp_path / "flower-server" / "model",
        )
    )
    assert np.abs(own - begin).max() > 1e-4
    assert np.abs(over_flower - own).max() < 1e-6
