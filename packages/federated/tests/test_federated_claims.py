"""The claim about federated averaging: its rule, and what it measures with."""

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from claim_verdicts import verdict
from modelwright.core.progress import SilentProgress
from modelwright.data.document import Document
from modelwright_claims.claim import Setting
from modelwright_federated.claims import federated


def documents(num_modules: int) -> list[Document]:
    dice = random.Random(0)
    return [
        Document(
            id=f"{module}.{number}", text="x" * dice.randint(50, 400), kind="prose", split="train", source="s",
            meta={"module": f"pkg{module % 5}.m{module:03d}"},
        )
        for module in range(num_modules)
        for number in range(dice.randint(1, 6))
    ]  # fmt: skip


@pytest.mark.parametrize("split", ["iid", "module"])
def test_clients_get_equally_much_and_modules_stay_whole(split: federated.Split) -> None:
    every = documents(200)
    clients = federated.dealt(every, split)
    assert len(clients) == federated.NUM_CLIENTS
    assert sorted(one.id for own in clients for one in own) == sorted(one.id for one in every)
    sizes = [sum(len(one.text) for one in own) for own in clients]
    assert max(sizes) < 1.1 * min(sizes)
    modules = [{one.meta["module"] for one in own} for own in clients]
    overlap = sum(len(a & b) for a, b in itertools.combinations(modules, 2))
    assert overlap == 0 if split == "module" else overlap > 50


def test_averaging_that_was_best_in_tuning_is_compared_with_the_best_central_training() -> None:
    samples = {f"{federated.LOSS}{method}": [2.2, 2.2, 2.2] for method in federated.CENTRAL}
    samples[f"{federated.LOSS}central, AdamW"] = [2.0, 2.01, 2.0]
    for method in federated.AVERAGING:  # FedAvg ends lower, and FedAdam was chosen
        samples[f"tuning, {method}"] = [3.0, 2.0 if "FedAdam" in method else 2.5, 3.0]
        samples[f"{federated.LOSS}{method}"] = [1.9, 1.9, 1.9]
    samples |= {f"{federated.LOSS}FedAdam, IID": [2.01, 2.02, 2.01]}
    samples |= {f"{federated.LOSS}FedAdam, by module": [2.05, 2.06, 2.05]}
    met = verdict(federated.CLAIM, samples)
    assert met.kind == "met"
    assert met.figures["loss above central, AdamW, averaging, IID"].value == pytest.approx(0.5, abs=0.01)
    assert (
        verdict(federated.CLAIM, {**samples, f"{federated.LOSS}FedAdam, by module": [2.15, 2.16, 2.15]}).kind == "short"
    )
    for rival in federated.CENTRAL:
        assert verdict(federated.CLAIM, {**samples, f"{federated.LOSS}{rival}": [1.8, 1.8, 1.8]}).kind == "short"
    assert (
        verdict(federated.CLAIM, {**samples, "tuning, FedAvg, IID": [1.9, 1.9, 1.9]})
        .figures["loss above central, AdamW, averaging, IID"]
        .value
        < 0
    )  # now FedAvg was chosen


def plan(*, quick: bool = False) -> federated.Plan:
    return federated.plan_of(Setting(quick=quick, folder=Path(), progress=SilentProgress()))


def test_both_rates_are_tuned_until_the_best_lies_inside() -> None:
    arms = dict(zip(federated.ARMS, (1e-4, 0.3, 9e-3, 3e-3, 1e-3, 0.02), strict=True))
    best_server = {"FedAdam, IID": 1e-3, "FedAdam, by module": 0.3}
    made: list[federated.FederatedRun] = []

    def distance(run: federated.FederatedRun) -> float:
        server = math.log(run.server_learning_rate / best_server[run.method]) if run.method in best_server else 0.0
        return abs(math.log(run.learning_rate / arms[run.method])) + abs(server)

    def losses(runs: Sequence[federated.FederatedRun]) -> list[float]:
        made.extend(runs)
        return [distance(run) for run in runs]

    best, tuning = federated.tune(plan(), losses, is_tuned=True)
    assert set(best) == set(tuning) == set(federated.ARMS)
    assert {(run.heldout, run.seed) for run in made} == {("validation", federated.TUNING_SEED)}
    for method, run in best.items():
        assert min(tuning[method].values()) == pytest.approx(distance(run)), method
        assert distance(run) < math.log(3), method
        for field in ("learning_rate", "server_learning_rate") if method in best_server else ("learning_rate",):
            tried = {getattr(one, field) for one in made if one.method == method}
            assert min(tried) < getattr(run, field) < max(tried)


@pytest.mark.parametrize("quick", [False, True])
def test_every_arm_trains_by_the_optimizer_strategy_and_rows_of_its_name(quick: bool) -> None:
    pytest.importorskip("flwr")
    from flwr.serverapp.strategy import FedAdam, FedAvg

    from modelwright_federated.local_training import client_steps
    from modelwright_federated.server import new_strategy

    size = plan(quick=quick).model
    num_tokens = plan(quick=quick).num_batches * size.batch_tokens
    for method, arm in federated.ARMS.items():
        run = federated.FederatedRun(
            plan=plan(quick=quick), method=method, learning_rate=0.01, server_learning_rate=0.02, seed=0
        )
        assert (arm.split is None) == (method in federated.CENTRAL) == method.startswith("central, AdamW")
        if arm.split is None:
            config = federated.central_size(run).train_config()
            assert config.num_steps * config.batch_tokens == num_tokens
            assert config.batch_tokens == size.batch_tokens * (4 if "all clients" in method else 1)
            assert (config.optimizer, config.learning_rate, config.schedule.kind) == ("adamw", 0.01, "warmup_cosine")
            continue
        config = federated._federated_config(run)
        local = client_steps(size.train_config(), config)
        assert federated.NUM_CLIENTS * config.num_rounds * local.num_steps * local.batch_tokens == num_tokens
        assert (local.optimizer, local.learning_rate, local.schedule.kind) == ("adamw", 0.01, "constant")
        strategy = new_strategy(config)
        assert type(strategy) is (FedAdam if "FedAdam" in method else FedAvg)
        assert getattr(strategy, "eta", 0.02) == 0.02
        assert federated.SPLITS[arm.split] == method.rpartition(", ")[2]
