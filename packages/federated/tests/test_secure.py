"""Secure aggregation by Flower's protocol: what the server gets, clients that are lost at each stage, and noise."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from federated_peers import MadeUp, MemoryGrid, from_round_1, mean_of, own_change, server, settings, trainings
from modelwright.core.config import ModelwrightError
from modelwright.core.records import read_records
from modelwright_federated.client import FederatedClient
from modelwright_federated.secure import mean_error, protocol
from modelwright_federated.server import LOG_FILE

NAMES = ("ann", "ben", "cem", "dia")
SECURE = {
    "secure_aggregation": {"enabled": True, "threshold": 3}, "privacy": {"clip_norm": 4.0}, "min_clients": 3,
    "batch_tokens": 2,
}  # fmt: skip
"""Two labels are the most that a client of 1 step of 2 tokens can have, and as many as those of the tests have."""


def test_the_mean_is_exact_up_to_the_stated_quantization(tmp_path: Path) -> None:
    """Labels of 1 and 2: a weighted mean. The loss of the round is masked and summed, too."""
    config = settings(num_rounds=1, **SECURE)
    labels = dict(zip(NAMES, (1.0, 2.0, 2.0, 1.0), strict=True))
    grid = MemoryGrid(config, [MadeUp(name, labels=labels[name]) for name in NAMES])
    weights = server(grid, config, tmp_path).run()
    expected = sum(labels[name] * own_change(name, 0).astype(np.float64) for name in NAMES) / 6
    error = mean_error(config, num_drawn=4, num_clients=4, weight=6.0)
    assert error < 2e-7
    assert np.abs(weights - expected).max() < error + 1e-7 * np.abs(expected).max()  # the weights themselves are FP32
    record = read_records(tmp_path / LOG_FILE)[0]
    assert record["clients"] == list(NAMES)
    assert record["loss"] == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize("stage", range(4))
def test_a_client_that_is_lost_at_any_stage_leaves_the_sum_of_the_others_exact(tmp_path: Path, stage: int) -> None:
    """In the last stage its update is part of the sum already."""
    config = settings(**SECURE)
    grid = MemoryGrid(
        config, trainings(), lost=lambda name, number, message: name == "ben" and number == 1 and message >= stage
    )
    weights = server(grid, config, tmp_path).run()
    second = NAMES if stage == 3 else ("ann", "cem", "dia")
    error = mean_error(config, num_drawn=4, num_clients=4, weight=6.0)
    assert np.abs(weights - mean_of(NAMES, 0) - mean_of(second, 1)).max() < 2 * error + 1e-7
    assert read_records(tmp_path / LOG_FILE)[1]["clients"] == list(second)


def test_a_client_without_a_label_is_not_in_the_sum(tmp_path: Path) -> None:
    """Divided by its number of labels its update is no number, which masks would spread over the whole sum."""
    config = settings(num_rounds=1, **SECURE)
    empty = MadeUp("ben", lambda change, _: change * np.float32(np.nan), labels=0.0)
    grid = MemoryGrid(config, [empty if name == "ben" else MadeUp(name) for name in NAMES])
    weights = server(grid, config, tmp_path).run()
    assert weights == pytest.approx(mean_of(["ann", "cem", "dia"], 0), abs=1e-6)
    assert read_records(tmp_path / LOG_FILE)[0]["clients"] == ["ann", "cem", "dia"]


def test_too_few_clients_give_the_round_up(tmp_path: Path) -> None:
    config = settings(**SECURE)
    grid = MemoryGrid(
        config, trainings(), lost=lambda name, number, message: name in "ann ben" and number == 1 and message >= 2
    )
    weights = server(grid, config, tmp_path).run()
    assert weights == pytest.approx(mean_of(NAMES, 0), abs=1e-6)
    assert "fewer than 3 clients stayed" in read_records(tmp_path / LOG_FILE)[1]["error"]


def test_the_server_gets_masked_numbers(tmp_path: Path) -> None:
    """Two trainings with the same updates send other numbers, all over the range of the modulus."""
    sent = []
    for trial in range(2):
        config = settings(num_rounds=1, **SECURE)
        grid = MemoryGrid(config, trainings())
        server(grid, config, tmp_path / str(trial)).run()
        masked = [
            bytes_to_ndarray(record[Key.MASKED_PARAMETERS][1])
            for reply in grid.replies
            if Key.MASKED_PARAMETERS in (record := reply.content[RECORD_KEY_CONFIGS])
        ]
        assert len(masked) == 4
        assert all(not any(one.values()) for reply in grid.replies for one in reply.content.array_records.values())
        sent += masked
    assert all(not np.array_equal(one, other) for one, other in itertools.combinations(sent, 2))
    for numbers in sent:  # uniform: a mean of half the modulus, with a standard error of its 1/sqrt(12 N)
        assert numbers.mean() / 2**32 == pytest.approx(0.5, abs=6 / math.sqrt(12 * numbers.size))


def test_a_client_that_does_not_clip_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four keep the rules in the first round, which counts; the second is given up."""
    config = settings(**SECURE)
    update = FederatedClient._update

    def unclipped(client, weights, told):
        if client.name == "ben" and told["server-round"] == 2:
            return client.training().round(weights, number=1, proximal_mu=0.0)
        return update(client, weights, told)

    monkeypatch.setattr(FederatedClient, "_update", unclipped)
    grid = MemoryGrid(config, trainings(ben=from_round_1(lambda change: change * np.float32(1000))))
    monkeypatch.setattr("modelwright_federated.client.protocol", lambda *_: {})
    # Flower clips every number to the range of the quantization, so that a client cannot do worse than that.
    weights = server(grid, config, tmp_path).run()
    assert weights == pytest.approx(mean_of(NAMES, 0), abs=1e-6)
    error = read_records(tmp_path / LOG_FILE)[1]["error"]
    assert "the mean of ann, ben, cem, dia has a norm of" in error
    assert "at least one of these clients does not clip" in error


def test_clients_insist_on_the_protocol(tmp_path: Path) -> None:
    """A server with a lower threshold could unmask an update with fewer clients; it gets no keys."""
    grid = MemoryGrid(settings(**SECURE), trainings())
    weaker = settings(**(SECURE | {"secure_aggregation": {"enabled": True, "threshold": 2}}))
    made = server(grid, weaker, tmp_path)
    with pytest.raises(ModelwrightError, match="fewer than 2 clients stayed"):
        made.run()
    assert not made.weights.any()
    assert "the server has other settings" in grid.notes[0]


@pytest.mark.parametrize("is_secure", [False, True])
def test_noise_has_the_stated_size(tmp_path: Path, is_secure: bool) -> None:
    """The server's, or that of three clients, each of which adds its part."""
    size, secure = 6000, {"enabled": True, "threshold": 3} if is_secure else {"enabled": False}
    privacy = {"epsilon": 3.0, "clip_norm": 0.5}
    config = settings(num_rounds=1, min_clients=3, clients_per_round=3, privacy=privacy, secure_aggregation=secure)
    grid = MemoryGrid(config, trainings()[:3])
    names = NAMES[:3]
    weights = server(grid, config, tmp_path, np.zeros(size, np.float32)).run()
    total = sum(own_change(n, 0, size) * 0.5 / np.linalg.norm(own_change(n, 0, size)) for n in names)
    noise = weights - total / 3
    assert noise.std() == pytest.approx(config.noise_multiplier * 0.5 / 3, rel=0.05)  # a standard error of 0.9%
    record = read_records(tmp_path / LOG_FILE)[0]
    assert record["epsilon"] == pytest.approx(3.0, rel=1e-6)
    assert record["loss"] == "nan"


def test_the_sum_stays_below_the_modulus() -> None:
    config = settings(**SECURE)
    for num_clients in (2, 3, 4, 5, 63, 64, 100, 1000):
        assert num_clients * protocol(config, num_clients)[Key.TARGET_RANGE] < 2**32


def test_with_noise_a_client_that_is_lost_counts_as_no_change(tmp_path: Path) -> None:
    """The noise is for the mean of four; in a mean of three, one client would weigh more than it hides."""
    privacy = {"epsilon": 1e5, "clip_norm": 0.5}  # of next to no noise
    config = settings(num_rounds=1, clients_per_round=4, privacy=privacy)
    grid = MemoryGrid(config, trainings(ben=lambda change, _: change * np.float32(np.nan)))
    weights = server(grid, config, tmp_path).run()
    total = sum(own_change(n, 0) * 0.5 / np.linalg.norm(own_change(n, 0)) for n in ("ann", "cem", "dia"))
    assert weights == pytest.approx(total / 4, abs=5e-3)
    assert np.abs(total / 4 - total / 3).max() > 1e-2
