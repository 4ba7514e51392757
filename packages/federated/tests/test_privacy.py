"""The accountant against a numerical integral and known values, and the warning about noise."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy.integrate import quad
from scipy.stats import norm

pytest.importorskip("flwr")

from federated_peers import MemoryGrid, server, settings, trainings
from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.recipes.load import recipe
from modelwright_federated.config import FederatedConfig
from modelwright_federated.privacy import epsilon_after, gaussian_delta, noise_multiplier, noise_ratio, noise_warning
from modelwright_federated.weights import GlobalWeights, attach_federated

PAGE = Path(__file__).parents[3] / "docs" / "federated.md"


@pytest.mark.parametrize(("epsilon", "std"), [(0.5, 1.0), (1.0, 2.0), (3.0, 0.5), (0.0, 1.0)])
def test_delta_is_the_hockey_stick_divergence(epsilon: float, std: float) -> None:
    """The integral of what one density exceeds e^epsilon times the other by."""

    def excess(x: float) -> float:
        return max(0.0, norm.pdf(x, 1, std) - math.exp(epsilon) * norm.pdf(x, 0, std))

    expected, _ = quad(excess, -12 * std, 1 + 12 * std, limit=500, points=[0.5 + epsilon * std**2])
    assert gaussian_delta(epsilon, std) == pytest.approx(expected, rel=1e-5)


def test_rounds_compose_as_one_gaussian_of_their_summed_information() -> None:
    """T rounds with noise z tell as much as one whose mean is sqrt(T) away; a single round is the formula itself."""
    assert epsilon_after(9, noise_multiplier=3.0, delta=1e-5) == pytest.approx(
        epsilon_after(1, noise_multiplier=1.0, delta=1e-5), rel=1e-9
    )
    losses = [epsilon_after(rounds, noise_multiplier=2.0, delta=1e-5) for rounds in range(5)]
    assert losses == sorted(losses)
    assert losses[0] == 0
    assert epsilon_after(1, noise_multiplier=0.0, delta=1e-5) == math.inf


def test_it_is_never_above_the_bound_of_renyi_differential_privacy() -> None:
    """Mironov 2017, proposition 3, over a fine grid of orders: an upper bound of the exact value, and a near one."""
    orders = np.linspace(1.01, 200, 20000)
    for z, rounds in ((1.1, 20), (5.0, 10), (0.8, 1)):
        bound = (rounds * orders / (2 * z**2) + math.log(1e5) / (orders - 1)).min()
        exact = epsilon_after(rounds, noise_multiplier=z, delta=1e-5)
        assert 0.75 * bound < exact <= bound


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 50.0, 1000.0])
def test_the_noise_for_an_epsilon_gives_that_epsilon(epsilon: float) -> None:
    z = noise_multiplier(epsilon, delta=1e-6, num_rounds=30)
    assert epsilon_after(30, noise_multiplier=z, delta=1e-6) == pytest.approx(epsilon, rel=1e-4)


def test_noise_that_swamps_the_updates_is_named() -> None:
    """The norm of Gaussian noise over the clipping norm, by drawing some."""
    draw = np.random.default_rng(0).normal(0.0, 1.5 * 0.5, 40_000) / 8
    ratio = noise_ratio(1.5, num_weights=40_000, num_clients=8)
    assert np.linalg.norm(draw) / 0.5 == pytest.approx(ratio, rel=0.02)
    assert "38 times as long" in noise_warning(ratio, num_weights=40_000, num_clients=8)
    assert noise_warning(noise_ratio(1.5, num_weights=400, num_clients=8), num_weights=400, num_clients=8) == ""


@pytest.mark.parametrize(("size", "warns"), [(1_000, False), (100_000, True)])
def test_the_server_says_how_long_the_noise_is(size: int, warns: bool, tmp_path: Path) -> None:
    config = settings(num_rounds=1, clients_per_round=4, privacy={"epsilon": 8.0, "clip_norm": 0.5})
    made = server(MemoryGrid(config, trainings()), config, tmp_path, np.zeros(size, np.float32))
    made.run()
    ratio = noise_ratio(config.noise_multiplier, num_weights=size, num_clients=4)
    assert f"the noise of a round is {ratio:.1f} times as long as the longest update" in made.notes[0]
    assert [note.startswith("warning: privacy.epsilon: ") for note in made.notes[1:2]] == [warns]


def test_the_settings_of_the_page_leave_the_updates_above_the_noise() -> None:
    """For the quickstart's model, with the figures that the page gives."""
    section = PAGE.read_text(encoding="utf-8").partition("## Differential privacy")[2]
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block
    config = parse(FederatedConfig, {**yaml.safe_load(block[1]), "num_rounds": 20})
    assert config.lora.aggregation == "ffa"
    base = recipe("quickstart")
    model = Decoder(replace(base.model, vocab_size=base.tokenizer.vocab_size))
    num_all = sum(one.numel() for one in model.parameters())
    attach_federated(model, config.lora, seed=0)
    num_sent = len(GlobalWeights(model, config.lora).read())
    with_lora, without = (
        noise_ratio(config.noise_multiplier, num_weights=number, num_clients=config.clients_per_round)
        for number in (num_sent, num_all)
    )
    assert f"it is {with_lora:.0f} with the settings above and {without:.0f} without" in section.replace("\n", " ")
    assert noise_warning(with_lora, num_weights=num_sent, num_clients=config.clients_per_round) == ""
