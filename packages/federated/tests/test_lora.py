"""Adapters are averaged exactly, by real local training; averaging A and B alone is not; personal ones stay apart."""

from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from safetensors.numpy import load_file

pytest.importorskip("flwr")

from federated_peers import OwnRows, local_training, tiny_model
from modelwright.core.config import parse
from modelwright.model.adapters import ADAPTER, adapters_of, merge_adapters
from modelwright.model.decoder import Decoder
from modelwright.model.peft_folder import load_adapter
from modelwright_federated.config import FederatedLoraConfig
from modelwright_federated.local_training import ADAPTER_FOLDER, PERSONAL
from modelwright_federated.weights import GlobalWeights, add_missed_products

CLIENTS, SHARES = (OwnRows(0, 3), OwnRows(3, 8)), (0.75, 0.25)


def effective(model: Decoder) -> dict[str, np.ndarray]:
    """The weights of all projections with their adapters."""
    return {
        name: adapter.merged(model.projections()[name].weight.double()).numpy()
        for name, adapter in adapters_of(model).items()
    }


@pytest.mark.parametrize("aggregation", ["ffa", "fedex"])
def test_the_aggregate_is_the_mean_of_the_deltas(aggregation: str, tmp_path: Path) -> None:
    """Two rounds, because A and B are both away from where they began only in the second."""
    lora = {"r": 4, "lora_alpha": 8.0, "aggregation": aggregation}
    model = tiny_model(config := parse(FederatedLoraConfig, lora))
    exchanged = GlobalWeights(model, config)
    weights = exchanged.read()
    for number in range(2):
        clients, of_clients = [], []
        for rows in CLIENTS:
            local = local_training(tmp_path, rows, local_steps=3, lora=lora)
            own = weights.astype(np.float64)
            own[exchanged.num_frozen :] += local.round(weights, number=number, proximal_mu=0.0).change
            assert np.linalg.norm(own - weights) > 0.01
            clients.append(own)
            exchanged.write(own.astype(np.float32))
            of_clients.append(effective(model))
        apart = sum(share * one for share, one in zip(SHARES, clients, strict=True))
        exact = apart.copy()
        exchanged.write(weights)
        add_missed_products(exact, clients, SHARES, exchanged.projections())
        gaps = {}
        for name, mean in (("exact", exact), ("apart", apart)):
            exchanged.write(mean.astype(np.float32))
            gaps[name] = max(
                np.abs(one - 0.75 * ann - 0.25 * ben).max()
                for one, ann, ben in zip(*(each.values() for each in (effective(model), *of_clients)), strict=True)
            )
        assert gaps["exact"] < 1e-6
        if aggregation == "fedex":
            assert gaps["apart"] > 20 * gaps["exact"], "averaging A and B by themselves misses the mean of the deltas"
        weights = exact.astype(np.float32)


def test_clients_of_ffa_train_b_alone_and_send_nothing_else(tmp_path: Path) -> None:
    local = local_training(tmp_path, OwnRows(0, 4), local_steps=2, lora={"r": 4})
    before = {name: one.detach().clone() for name, one in local.model.named_parameters()}
    update = local.round(start := local.weights.read(), number=0, proximal_mu=0.1)
    assert len(start) == sum(one.lora_B.numel() for one in adapters_of(local.model).values())
    assert len(start) < local.model.config.num_parameters / 4
    moved = {name for name, one in local.model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {f"{name}{ADAPTER}lora_B" for name in adapters_of(local.model)}
    assert update.norm > 0


def test_personal_adapters_share_a_and_keep_b(tmp_path: Path) -> None:
    """A client that is started again goes on with its own B, and writes an adapter that loads into the plain model."""
    lora = {"r": 4, "aggregation": "personal"}
    first = local_training(tmp_path, OwnRows(0, 4), local_steps=2, lora=lora)
    shared = first.weights.read()
    assert len(shared) == sum(one.lora_A.numel() for one in adapters_of(first.model).values())
    first.round(shared, number=0, proximal_mu=0.0)
    stored = load_file(tmp_path / PERSONAL)
    assert set(stored) == {f"{name}{ADAPTER}lora_B" for name in adapters_of(first.model)}
    assert max(np.abs(one).max() for one in stored.values()) > 0
    again = local_training(tmp_path, OwnRows(0, 4), local_steps=2, lora=lora)
    again._read_personal()
    for name, value in stored.items():
        assert np.array_equal(again.model.get_parameter(name).detach().numpy(), value)
    again.round(shared, number=1, proximal_mu=0.0)
    plain = tiny_run.tiny_model()
    load_adapter(plain, tmp_path / ADAPTER_FOLDER)
    merge_adapters(plain)
    merge_adapters(again.model)
    for name, projection in plain.projections().items():
        assert torch.allclose(projection.weight, again.model.projections()[name].weight, atol=1e-6)


def test_merging_gives_a_plain_model_with_the_same_outputs() -> None:
    model = tiny_model(config := FederatedLoraConfig(r=4, aggregation="fedex"))
    exchanged = GlobalWeights(model, config)
    exchanged.write(exchanged.read() + np.float32(0.01))
    expected = effective(model)
    merge_adapters(model)
    assert not adapters_of(model)
    for name, projection in model.projections().items():
        assert np.abs(projection.weight.detach().numpy() - expected[name]).max() < 1e-6
