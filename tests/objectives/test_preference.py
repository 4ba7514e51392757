"""DPO, cDPO, IPO and ORPO: losses, metrics and gradients on packed rows equal those written out pair by pair."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

import preference_rows
from modelwright.core.config import ConfigError, parse, unused_settings
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.model.decoder import Decoder
from modelwright.objectives.preference import Preference, PreferenceConfig, log_odds, shares_right
from modelwright.train.objective import TermSums, forward

BETA, NUM_PAIRS = 0.3, 10
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Log-probabilities of the chosen and the rejected answer's tokens, and the same of the reference -> the loss."""


def dpo(smoothing: float = 0.0) -> Loss:
    def loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
        odds = torch.exp(BETA * (chosen.sum() - ref_chosen.sum() - rejected.sum() + ref_rejected.sum()))
        right = odds / (1 + odds)
        return -(1 - smoothing) * right.log() - smoothing * (1 - right).log()

    return loss


def normalized_dpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    margin = (chosen - ref_chosen).mean() - (rejected - ref_rejected).mean()
    return (1 + torch.exp(-BETA * margin)).log()


def ipo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    margin = (chosen - ref_chosen).mean() - (rejected - ref_rejected).mean()
    return (margin - 1 / (2 * BETA)) ** 2


def orpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    likelihoods = chosen.mean().exp(), rejected.mean().exp()
    odds = [likelihood / (1 - likelihood) for likelihood in likelihoods]
    return -BETA * torch.sigmoid((odds[0] / odds[1]).log()).log()


CASES: dict[str, tuple[dict[str, Any], Loss, float]] = {
    "dpo": ({"loss": "sigmoid"}, dpo(), 0.0),
    "cdpo": ({"loss": "sigmoid", "label_smoothing": 0.2}, dpo(0.2), 0.0),
    "length normalized": ({"loss": "sigmoid_norm"}, normalized_dpo, 0.0),
    "ipo": ({"loss": "ipo"}, ipo, 0.0),
    "rpo": ({"loss": "sigmoid", "rpo_alpha": 0.7}, dpo(), 0.7),
    "orpo": ({"loss": "orpo"}, orpo, 1.0),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PackedRows:
    return preference_rows.packed(tmp_path_factory.mktemp("pairs"), preference_rows.pairs(NUM_PAIRS))


def written_out(name: str, model: Decoder) -> tuple[Tensor, dict[str, float]]:
    """The loss and the metrics, pair by pair, each answer in a forward pass of its own."""
    _, loss_of, sft_weight = CASES[name]
    reference = preference_rows.other_model(5, torch.float64)
    losses, nlls, figures = list[Tensor](), list[Tensor](), defaultdict[str, list[float]](list)
    for pair in preference_rows.pairs(NUM_PAIRS):
        own = [preference_rows.answer_log_probs(model, one) for one in pair]
        with torch.no_grad():
            ref = [preference_rows.answer_log_probs(reference, one) for one in pair]
        losses.append(loss_of(*own, *ref))
        nlls.append(-own[0])
        per_answer = torch.mean if name == "orpo" else torch.sum
        log_probs = [float(per_answer(one.detach())) for one in own]
        ratios = [float((a - b).sum().detach()) for a, b in zip(own, ref, strict=True)]
        good, bad = (BETA * value for value in (log_probs if name == "orpo" else ratios))
        found = {
            "rewards/chosen": good, "rewards/rejected": bad, "rewards/margins": good - bad,
            "rewards/accuracies": float(good > bad), "logps/chosen": log_probs[0], "logps/rejected": log_probs[1],
        }  # fmt: skip
        for key, value in found.items():
            figures[key].append(value)
    nll = torch.cat(nlls).mean()
    metrics = {key: sum(values) / len(values) for key, values in figures.items()}
    if sft_weight:
        metrics["nll_loss"] = float(nll.detach())
    return torch.stack(losses).mean() + sft_weight * nll, metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_written_out(name: str, rows: PackedRows) -> None:
    settings = {"beta": BETA, "gradient_accumulation_steps": 2, "precision": {"policy": "fp32"}}
    config = parse(PreferenceConfig, {**settings, **CASES[name][0]})
    reference = preference_rows.reference_model(torch.float64) if config.has_reference else None
    objective = Preference(PackedLoader(rows, batch_rows=rows.num_groups, seed=1), config, reference)
    model = preference_rows.other_model(8, torch.float64)
    parameters = list(model.parameters())

    batch = objective.prepare(next(rows.batches(rows.num_groups)), model).padded(rows.num_groups + 2)
    factors = {key: 1 / float(weight) for key, weight in objective.weights(batch).items()}
    sums = TermSums(factors, objective.metric_names, torch.device("cpu"))
    parts = batch.split(batch.num_groups)
    total = torch.stack([sums.add(objective.losses(forward(model, one), one, model)).sum() for one in parts]).sum()
    gradients = torch.autograd.grad(total, parameters)

    expected, figures = written_out(name, model)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        assert other.any()
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-10)
    _, metrics = sums.read(sums.vector.tolist())
    assert metrics.keys() - {"log_odds_ratio", "log_odds_chosen"} == figures.keys()
    for key, value in figures.items():
        assert metrics[key] == pytest.approx(value, rel=1e-9), key


@pytest.mark.parametrize("policy", ["fp32", "bf16_mixed"])
def test_a_policy_that_is_its_own_reference_has_a_reward_of_zero(policy: str, rows: PackedRows) -> None:
    """And half of its pairs in the right order, whatever rounding makes of them."""
    model = preference_rows.other_model(5, torch.float32)
    objective = Preference(
        PackedLoader(rows, batch_rows=4, seed=1),
        parse(PreferenceConfig, {"precision": {"policy": policy}}),
        preference_rows.reference_model(torch.float32),
    )
    batch = next(objective.batches(model, first=0, rank=0, world_size=1))
    narrow = torch.autocast("cpu", torch.bfloat16, enabled=policy == "bf16_mixed")
    with narrow:
        terms = objective.losses(forward(model, batch), batch, model)
    total, count = terms.metrics["rewards/accuracies"]
    assert float(total) == float(count) / 2
    if policy != "fp32":
        assert float(terms.metrics["rewards/margins"][0]) != 0, "rounding alone makes a margin"
        return
    assert float(terms.metrics["rewards/margins"][0].abs()) < 1e-5
    mean = float(terms.losses["preference"].detach() / objective.weights(batch)["preference"])
    assert mean == pytest.approx(float(torch.tensor(2.0).log()), abs=1e-6)


@pytest.mark.parametrize(
    ("margin", "resolution", "credit"),
    [(0.3, 0.1, 1.0), (-0.3, 0.1, 0.0), (0.05, 0.1, 0.5), (0.0, 0.0, 0.5), (1e-9, 0.0, 1.0)],
)
def test_a_margin_within_the_resolution_counts_one_half(margin: float, resolution: float, credit: float) -> None:
    assert shares_right(torch.tensor([margin]), torch.tensor([resolution])).tolist() == [credit]


def test_rows_without_labels_count_nothing(rows: PackedRows) -> None:
    model = tiny_run.tiny_model()
    objective = Preference(PackedLoader(rows, batch_rows=4, seed=1), PreferenceConfig(loss="orpo"), None)
    batch = rows.gather(torch.arange(2).numpy()).without_weight(torch.arange(2))
    assert (batch.labels_BT == IGNORED).all()
    assert {float(weight) for weight in objective.weights(batch).values()} == {0.0}
    terms = objective.losses(forward(model, batch), batch, model)
    total = torch.stack(list(terms.losses.values())).sum()
    total.backward()
    assert float(total.detach()) == 0.0
    assert not any(one.grad is not None and bool(one.grad.any()) for one in model.parameters())


def test_odds_stay_finite_where_a_token_is_certain() -> None:
    log_probs = torch.tensor([0.0, -1e-20, -1e-4, -50.0], requires_grad=True)
    odds = log_odds(log_probs)
    odds.sum().backward()
    assert bool(odds.isfinite().all())
    assert log_probs.grad is not None
    assert bool(log_probs.grad.isfinite().all())
    assert float(odds[3].detach()) == pytest.approx(-50.0)


@pytest.mark.parametrize(("changes", "problem"), [
    ({"beta": 0.0}, "beta: must be above 0"),
    ({"label_smoothing": 0.5}, "label_smoothing: must be in"),
    ({"rpo_alpha": -1.0}, "rpo_alpha: must not be negative"),
])  # fmt: skip
def test_bad_settings(changes: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(PreferenceConfig, changes)


def test_settings_of_another_loss_are_named() -> None:
    config = parse(PreferenceConfig, {"loss": "orpo", "label_smoothing": 0.1})
    assert unused_settings(config) == ["label_smoothing (needs loss sigmoid or sigmoid_norm)"]
