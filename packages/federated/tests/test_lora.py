"""Adapters are averaged exactly, by real local training and over loopback; averaging A and B alone is not."""

from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch

pytest.importorskip("cryptography")

from federated_peers import OwnRows, sgd_settings
from modelwright.federated.aggregate import ClientUpdate, mean_of, mean_update
from modelwright.federated.config import FederatedConfig
from modelwright.federated.local_training import LocalTraining
from modelwright.federated.lora import FederatedLoraConfig, attach_federated, combination, frozen_weights
from modelwright.federated.weights import set_weights, weight_vector

from modelwright.core.config import parse
from modelwright.core.errors import ConfigError
from modelwright.model.adapters import ADAPTER, adapters_of, merge_adapters
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken

CLIENTS = {"ann": (OwnRows(0, 3), 3.0), "ben": (OwnRows(3, 8), 1.0)}
"""Rows, and how much an update counts."""


def with_adapters(config: FederatedLoraConfig) -> Decoder:
    model = tiny_run.tiny_model()
    attach_federated(model, config, seed=5)
    return model


def local(config: FederatedLoraConfig, rows: OwnRows, folder: Path) -> LocalTraining:
    model = with_adapters(config)
    return LocalTraining(
        model=model,
        source=rows,
        objective=NextToken,
        config=sgd_settings(batch_tokens=(rows.last - rows.first) * tiny_run.LENGTH),
        folder=folder,
        frozen=frozen_weights(model, config),
    )


def effective(model: Decoder) -> dict[str, np.ndarray]:
    """The weights of all projections with their adapters."""
    return {
        name: adapter.merged(model.projections()[name].weight.double()).numpy()
        for name, adapter in adapters_of(model).items()
    }


def changes(config: FederatedLoraConfig, weights: np.ndarray, folder: Path, *, number: int) -> dict[str, ClientUpdate]:
    """What two clients make of the weights in three steps."""
    updates = {}
    for name, (rows, weight) in CLIENTS.items():
        trained = local(config, rows, folder / name).round(weights, number=number, num_steps=3, proximal_mu=0.0)
        updates[name] = ClientUpdate(trained.change, weight)
    return updates


@pytest.mark.parametrize("aggregation", ["ffa", "fedex"])
def test_the_aggregate_is_the_mean_of_the_deltas(aggregation: str, tmp_path: Path) -> None:
    """Two rounds, because A and B are both away from where they began only in the second."""
    config = parse(FederatedLoraConfig, {"r": 4, "lora_alpha": 8.0, "aggregation": aggregation})
    model = with_adapters(config)
    frozen = frozen_weights(model, config)
    weights = weight_vector(model, frozen)
    size = len(weight_vector(model))
    for number in range(2):
        updates = changes(config, weights, tmp_path, number=number)
        assert all(update.norm > 0.01 for update in updates.values())
        of_clients = []
        for update in updates.values():
            set_weights(model, weights + np.append(np.zeros(len(weights) - size, np.float32), update.change), frozen)
            of_clients.append(effective(model))
        aggregate = mean_update(
            updates, size=size, most=0.0, max_norm_ratio=100.0, weights=weights, combine=combination(model, config)
        )
        apart = mean_of(weights, [update.change.astype(float) for update in updates.values()], [0.75, 0.25])
        gaps = {}
        for name, change in (
            ("exact", aggregate.change),
            ("apart", np.append(np.zeros(len(weights) - size), apart)),
        ):
            set_weights(model, (weights.astype(np.float64) + change).astype(np.float32), frozen)
            gaps[name] = max(
                np.abs(one - 0.75 * ann - 0.25 * ben).max()
                for one, ann, ben in zip(*(each.values() for each in (effective(model), *of_clients)), strict=True)
            )
        assert gaps["exact"] < 1e-6
        if aggregation == "fedex":
            assert gaps["apart"] > 20 * gaps["exact"], "averaging A and B by themselves misses the mean of the deltas"
        weights = (weights.astype(np.float64) + aggregate.change).astype(np.float32)


def test_clients_of_ffa_train_b_alone_and_send_nothing_else(tmp_path: Path) -> None:
    config = FederatedLoraConfig(r=4)
    training = local(config, OwnRows(0, 4), tmp_path)
    before = {name: one.detach().clone() for name, one in training.model.named_parameters()}
    start = weight_vector(training.model)
    update = training.round(start, number=0, num_steps=2, proximal_mu=0.1)
    assert len(start) == sum(one.lora_B.numel() for one in adapters_of(training.model).values())
    assert len(start) < training.model.config.num_parameters / 4
    moved = {name for name, one in training.model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {f"{name}{ADAPTER}lora_B" for name in adapters_of(training.model)}
    assert update.norm > 0


def test_merging_gives_a_plain_model_with_the_same_outputs(tmp_path: Path) -> None:
    model = with_adapters(FederatedLoraConfig(r=4, aggregation="fedex"))
    frozen = frozen_weights(model, FederatedLoraConfig(r=4, aggregation="fedex"))
    weights = weight_vector(model, frozen)
    set_weights(model, weights + np.float32(0.01), frozen)
    expected = effective(model)
    merge_adapters(model)
    assert not adapters_of(model)
    for name, projection in model.projections().items():
        assert np.abs(projection.weight.detach().numpy() - expected[name]).max() < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"r": -1}}, r"lora\.r: must not be negative"),
        (
            {"lora": {"r": 4, "aggregation": "fedex"}, "secure_sum": {"enabled": True}, "privacy": {"clip_norm": 1.0}},
            "secure aggregation and noise hide; set ffa",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(FederatedConfig, settings)
