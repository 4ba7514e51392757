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


def test_federated_loss_is_compared_with_the_better_central_training() -> None:
    loss = federated.LOSS
    samples = {f"{loss}iid": [2.01, 2.02, 2.01], f"{loss}module": [2.05, 2.06, 2.05]}
    samples |= {f"{loss}sgd": [2.2, 2.2, 2.2], f"{loss}adamw": [2.0, 2.01, 2.0]}
    assert verdict(federated.CLAIM, samples).kind == "met"
    assert verdict(federated.CLAIM, {**samples, f"{loss}module": [2.15, 2.16, 2.15]}).kind == "short"


def test_each_method_of_averaging_is_tuned_until_its_best_rate_lies_inside() -> None:
    best = {"iid": 0.3, "module": 3.0, "sgd": 1.0, "adamw": 1e-4}
    made: list[federated.FederatedRun] = []

    def losses(runs: Sequence[federated.FederatedRun]) -> list[float]:
        made.extend(runs)
        return [abs(math.log(run.learning_rate / best[run.method])) for run in runs]

    plan = federated.plan_of(Setting(quick=False, folder=Path(), progress=SilentProgress()))
    rates = federated._best_rates(plan, losses)
    assert rates == pytest.approx(best, rel=0.15)
    assert len(set(made)) == len(made)
    assert {run.heldout for run in made} == {"validation"}
    for method, rate in rates.items():
        tried = [run.learning_rate for run in made if run.method == method]
        assert min(tried) < rate < max(tried)
    assert sum(run.method == "iid" for run in made) == 3
