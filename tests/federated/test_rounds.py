"""Whole trainings over loopback with real processes: equality with central steps, and clients that misbehave."""

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny_run

import federated_peers

pytest.importorskip("cryptography")

from federated_peers import MOST_BYTES, OwnRows, local_training, own_change
from modelwright.core.config import parse
from modelwright.core.errors import ModelwrightError
from modelwright.core.records import read_records
from modelwright.federated.config import FederatedConfig
from modelwright.federated.hub import Hub
from modelwright.federated.server import LOG_FILE, FederatedServer
from modelwright.federated.transport import (
    ConnectionLostError,
    PeerConnection,
    PeerMessage,
    accept_client,
    connect_server,
    new_key,
    read_keys,
)
from modelwright.federated.weights import weight_vector
from rank_processes import fork_context

SIZE = 300
KEYS = {name: secrets.token_bytes(32) for name in ("ann", "ben", "cem", "dia")}


def settings(**changes) -> FederatedConfig:
    return parse(
        FederatedConfig, {"num_rounds": 2, "local_steps": 1, "min_clients": 2, "round_timeout_s": 60.0, **changes}
    )


@contextmanager
def hub_with(target: Callable, arguments: Mapping[str, tuple]) -> Iterator[Hub]:
    """A hub and one process for each client, which are gone in the end."""
    hub = Hub(KEYS, host="127.0.0.1", port=0, most_bytes=MOST_BYTES)
    processes = [
        fork_context().Process(target=target, args=(hub.port, name, KEYS[name], *more), daemon=True)
        for name, more in arguments.items()
    ]
    try:
        for process in processes:
            process.start()
        hub.wait_for(len(processes), timeout_s=60.0)
        yield hub
    finally:
        hub.close()
        for process in processes:
            process.kill()
            process.join(10)


def server(hub: Hub, config: FederatedConfig, weights: np.ndarray, folder: Path) -> FederatedServer:
    return FederatedServer(
        config=config, hub=hub, weights=weights, num_known=len(KEYS), folder=folder, note=lambda text: None
    )


def expected_mean(names: list[str], number: int) -> np.ndarray:
    return np.mean([own_change(name, number, SIZE).astype(np.float64) for name in names], axis=0)


def test_one_local_step_of_all_is_one_central_step(tmp_path: Path) -> None:
    """The clients' rows have different numbers of labels; together they are the central batch. Two rounds."""
    start = weight_vector(tiny_run.tiny_model())
    central = start
    for number in range(2):
        local = local_training(tmp_path / "central", OwnRows(0, 8))
        central = central + local.round(central, number=number, num_steps=1, proximal_mu=0.0).change
    config = settings(max_norm_ratio=100.0)
    clients = {name: (config, tmp_path, 2 * number) for number, name in enumerate(KEYS)}
    with hub_with(federated_peers.train_client, clients) as hub:
        federated = server(hub, config, start, tmp_path / "server").run()
    assert np.abs(central - start).max() > 1e-3
    assert np.abs(federated - central).max() < 1e-6


def test_the_proximal_term_pulls_back(tmp_path: Path) -> None:
    """Two steps by hand: the second gradient has mu times the first step added."""
    rows = OwnRows(0, 8)
    start = weight_vector(tiny_run.tiny_model())

    def change(mu: float, steps: int) -> np.ndarray:
        return local_training(tmp_path / "x", rows).round(start, number=0, num_steps=steps, proximal_mu=mu).change

    first, free, pulled = change(0.0, 1), change(0.0, 2), change(0.3, 2)
    assert np.abs(change(0.3, 1) - first).max() < 1e-7
    assert pulled - free == pytest.approx(-0.5 * 0.3 * first, abs=1e-6)  # 0.5: the learning rate
    assert np.linalg.norm(pulled) < np.linalg.norm(free)


def test_a_local_round_writes_no_checkpoint(tmp_path: Path) -> None:
    """No one would read it, and it is as large as the model."""
    local = local_training(tmp_path, OwnRows(0, 8))
    local.round(weight_vector(tiny_run.tiny_model()), number=0, num_steps=2, proximal_mu=0.0)
    assert list(tmp_path.rglob("metrics.jsonl"))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_round_ends_and_is_bounded_whatever_clients_do(tmp_path: Path) -> None:
    """From the second round on one client is killed, one is slow, one sends NaN; in another training 1000 times."""
    config = settings(round_timeout_s=5.0, min_clients=1)
    behaviors = {"ann": "killed", "ben": "slow", "cem": "nan", "dia": ""}
    with hub_with(federated_peers.run_client, {name: (config, one) for name, one in behaviors.items()}) as hub:
        started = time.monotonic()
        weights = server(hub, config, np.zeros(SIZE, np.float32), tmp_path / "a").run()
        took_s = time.monotonic() - started
    assert took_s < 300  # the slow one sleeps for 600
    first, second = expected_mean(list(KEYS), 0), expected_mean(["dia"], 1)
    assert weights == pytest.approx(first + second, abs=1e-6)
    rounds = read_records(tmp_path / "a" / LOG_FILE)
    assert rounds[0]["clients"] == sorted(KEYS)
    assert rounds[1]["clients"] == ["dia"]
    assert rounds[1]["refused"] == ["cem"]


def test_a_huge_update_is_bounded_when_few_others_come(tmp_path: Path) -> None:
    """One client is killed, one is slow, one is good, one sends 1000 times as much."""
    config = settings(round_timeout_s=5.0)
    behaviors = {"ann": "killed", "ben": "slow", "cem": "", "dia": "huge"}
    with hub_with(federated_peers.run_client, {name: (config, one) for name, one in behaviors.items()}) as hub:
        weights = server(hub, config, np.zeros(SIZE, np.float32), tmp_path).run()
    good, huge = (own_change(name, 1, SIZE).astype(np.float64) for name in ("cem", "dia"))
    second = (good + huge * 3.0 * np.linalg.norm(good) / np.linalg.norm(huge)) / 2
    assert weights == pytest.approx(expected_mean(list(KEYS), 0) + second, abs=1e-5)
    record = read_records(tmp_path / LOG_FILE)[1]
    assert (record["clients"], record["scaled"]) == (["cem", "dia"], ["dia"])


def test_a_huge_update_alone_is_bounded_by_the_last_round_of_a_server_that_was_killed(tmp_path: Path) -> None:
    first = settings(num_rounds=1)
    with hub_with(federated_peers.run_client, clients_with(first)) as hub:
        before = server(hub, first, np.zeros(SIZE, np.float32), tmp_path).run()
    config = settings(num_rounds=3, round_timeout_s=5.0, min_clients=1)
    behaviors = {"ann": "killed", "ben": "slow", "cem": "nan", "dia": "huge"}
    with hub_with(federated_peers.run_client, {name: (config, one) for name, one in behaviors.items()}) as hub:
        after = server(hub, config, np.zeros(SIZE, np.float32), tmp_path).run()
    rounds = read_records(tmp_path / LOG_FILE)
    assert [one["clients"] for one in rounds[1:]] == [["dia"], ["dia"]]
    bound = 3.0 * sorted(np.linalg.norm(own_change(name, 0, SIZE)) for name in KEYS)[1]
    assert [one["update_norm"] for one in rounds[1:]] == pytest.approx([bound, bound], rel=1e-5)
    huge = sum(own_change("dia", n, SIZE) * bound / np.linalg.norm(own_change("dia", n, SIZE)) for n in (1, 2))
    assert after - before == pytest.approx(huge, abs=1e-5)


def test_a_single_update_of_the_first_round_leaves_the_weights_alone(tmp_path: Path) -> None:
    config = settings(num_rounds=1, min_clients=1)
    with hub_with(federated_peers.run_client, {"ann": (config, "")}) as hub:
        weights = server(hub, config, np.zeros(SIZE, np.float32), tmp_path).run()
    assert weights == pytest.approx(np.zeros(SIZE))
    assert "a single update came" in read_records(tmp_path / LOG_FILE)[0]["error"]


def clients_with(config: FederatedConfig, **behaviors: str) -> dict[str, tuple]:
    """The four clients, which behave if nothing else is said."""
    return {name: (config, behaviors.get(name, "")) for name in KEYS}


def test_a_huge_update_is_scaled_and_a_server_resumes(tmp_path: Path) -> None:
    config = settings(num_rounds=1)
    with hub_with(federated_peers.run_client, clients_with(config)) as hub:
        before = server(hub, config, np.zeros(SIZE, np.float32), tmp_path).run()
    more = settings(num_rounds=2)
    with hub_with(federated_peers.run_client, clients_with(more, ann="huge")) as hub:
        after = server(hub, more, np.full(SIZE, 9, np.float32), tmp_path).run()
    rounds = read_records(tmp_path / LOG_FILE)
    assert [one["round"] for one in rounds] == [0, 1]
    assert rounds[1]["scaled"] == ["ann"]
    norms = [np.linalg.norm(own_change(name, 1, SIZE)) for name in KEYS]
    assert np.linalg.norm(after - before) <= (3.1 * np.median(norms) + sum(norms)) / 4


def test_secure_rounds_with_a_client_that_dies(tmp_path: Path) -> None:
    """The second round loses a client after it has shared its keys; the sum of the others is exact all the same."""
    secure = {"secure_sum": {"enabled": True, "threshold": 3}, "privacy": {"clip_norm": 100.0}}
    config = settings(min_clients=3, round_timeout_s=20.0, **secure)
    with hub_with(federated_peers.run_client, clients_with(config, ben="killed")) as hub:
        weights = server(hub, config, np.zeros(SIZE, np.float32), tmp_path).run()
    assert weights == pytest.approx(expected_mean(list(KEYS), 0) + expected_mean(["ann", "cem", "dia"], 1), abs=1e-6)
    assert read_records(tmp_path / LOG_FILE)[1]["refused"] == ["ben"]


@pytest.mark.parametrize("privacy", [{}, {"noise_multiplier": 1.0, "delta": 1e-4}], ids=["plain", "noise"])
def test_a_client_that_does_not_clip_changes_no_weight_by_a_secure_sum(tmp_path: Path, privacy: dict) -> None:
    """All four keep the rules in the first round, which counts; the second is given up."""
    config = settings(
        min_clients=3, secure_sum={"enabled": True, "threshold": 3}, privacy={"clip_norm": 2.0, **privacy}
    )
    assert max(np.linalg.norm(own_change(name, 0, SIZE)) for name in KEYS) < 2.0
    with hub_with(federated_peers.run_client, clients_with(config, ben="unclipped")) as hub:
        weights = server(hub, config, np.zeros(SIZE, np.float32), tmp_path).run()
    first, second = read_records(tmp_path / LOG_FILE)
    assert (first["clients"], first["error"]) == (sorted(KEYS), "")
    assert np.linalg.norm(weights) == pytest.approx(first["update_norm"], rel=1e-5)
    assert "the secure sum of ann, ben, cem, dia has a norm of" in second["error"]
    assert "at least one of these clients does not clip" in second["error"]
    assert (second["clients"], second["update_norm"]) == ([], 0.0)


def test_too_few_clients_leave_the_weights_alone(tmp_path: Path) -> None:
    config = settings(num_rounds=2, min_clients=4, round_timeout_s=20.0)
    with hub_with(federated_peers.run_client, clients_with(config, ann="nan")) as hub:
        weights = server(hub, config, np.zeros(SIZE, np.float32), tmp_path).run()
    assert weights == pytest.approx(expected_mean(list(KEYS), 0), abs=1e-6)
    assert "3 clients gave what was asked, 4 are needed" in read_records(tmp_path / LOG_FILE)[1]["error"]


def test_noise_has_the_stated_size(tmp_path: Path) -> None:
    config = settings(num_rounds=1, privacy={"clip_norm": 0.5, "noise_multiplier": 2.0, "delta": 1e-4})
    with hub_with(federated_peers.run_client, clients_with(config)) as hub:
        weaker = settings(num_rounds=1)
        with pytest.raises(ModelwrightError, match="0 clients gave what was asked"):  # each client insists on its noise
            server(hub, weaker, np.zeros(SIZE, np.float32), tmp_path / "weaker").round(0)
        weights = server(hub, config, np.zeros(SIZE, np.float32), tmp_path).run()
    clipped = [own_change(n, 0, SIZE) * 0.5 / np.linalg.norm(own_change(n, 0, SIZE)) for n in KEYS]
    noise = weights - np.mean(clipped, axis=0)
    assert noise.std() == pytest.approx(2.0 * 0.5 / 4, rel=0.25)  # 300 values: a standard error of 4%
    assert 0 < read_records(tmp_path / LOG_FILE)[0]["epsilon"] < 3


def test_noise_under_a_secure_sum_has_the_stated_size(tmp_path: Path) -> None:
    """`threshold` clients make enough, so that four of them make the square root of 4/3 times as much."""
    size, secure = 6000, {"enabled": True, "threshold": 3}
    privacy = {"clip_norm": 0.5, "noise_multiplier": 2.0, "delta": 1e-4}
    config = settings(min_clients=3, secure_sum=secure, privacy=privacy, round_timeout_s=20.0)
    with hub_with(federated_peers.run_client, clients_with(config, ben="killed")) as hub:
        weights = [np.zeros(size, np.float32)]
        for num_rounds in (1, 2):
            training = server(hub, config, weights[-1], tmp_path / str(num_rounds))
            weights.append((weights[-1] + training.round(num_rounds - 1).change).astype(np.float32))
    for number, names in enumerate((list(KEYS), ["ann", "cem", "dia"])):
        changes = {name: own_change(name, number, size) for name in names}
        total = sum(change * 0.5 / np.linalg.norm(change) for change in changes.values())
        noise = weights[number + 1] - weights[number] - total / 4  # the expected number of clients
        expected = 2.0 * 0.5 * np.sqrt(len(names) / 3) / 4
        assert noise.std() == pytest.approx(expected, rel=0.05)  # 6000 values: a standard error of 0.9%


@contextmanager
def connected_pair(client_key: bytes, server_key: bytes) -> Iterator[tuple[PeerConnection, PeerConnection]]:
    """Both ends after a handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            connect_server, "127.0.0.1", listener.getsockname()[1], name="ann", key=client_key, most_bytes=10_000,
            timeout_s=10.0,
        )  # fmt: skip
        sock, _ = listener.accept()
        with sock:
            try:
                name, served = accept_client(sock, {"ann": server_key}.get, most_bytes=10_000)
            except ConnectionLostError:
                waiting.result(timeout=10)
                raise
            client = waiting.result(timeout=10)
            assert name == "ann"
            yield client, served
            client.close()
            served.close()


class Recording:
    """A socket that keeps what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.sent = sock, bytearray()

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self.sock.sendall(data)


def test_messages_are_authenticated() -> None:
    with connected_pair(KEYS["ann"], KEYS["ann"]) as (client, served):
        client.send(PeerMessage({"kind": "hello"}, b"12345"))
        assert served.receive() == PeerMessage({"kind": "hello"}, b"12345")
        served.send(PeerMessage({"kind": "there"}))
        assert client.receive().kind == "there"
        sock = client.sock
        recording = Recording(sock)
        client.sock = recording  # pyright: ignore[reportAttributeAccessIssue]
        client.send(PeerMessage({"kind": "secret word"}))
        client.sock = sock
        assert served.receive().kind == "secret word"
        assert b"secret word" not in recording.sent
        sock.sendall(recording.sent)
        with pytest.raises(ConnectionLostError, match="not authentic"):
            served.receive()


def test_a_wrong_key_and_a_large_frame_are_refused() -> None:
    with (
        pytest.raises(ConnectionLostError, match="does not have the key of 'ann'"),
        connected_pair(KEYS["ann"], KEYS["ben"]),
    ):
        pass
    with connected_pair(KEYS["ann"], KEYS["ann"]) as (client, served):
        client.send(PeerMessage({"kind": "big"}, bytes(20_000)))
        with pytest.raises(ConnectionLostError, match="at most 10,000 are accepted"):
            served.receive()


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = new_key()
    path.write_text(f"# clients\nann {key}\n\n")
    path.chmod(0o600)
    assert read_keys(path) == {"ann": bytes.fromhex(key)}
    path.write_text(f"ann {key}\nann {key}\n")
    with pytest.raises(ValueError, match=":2: must be a new name"):
        read_keys(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_keys(path)
