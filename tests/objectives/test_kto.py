"""KTO: losses, metrics and gradients on packed rows equal those written out answer by answer, and the KL divergence is
that of the global batch."""

from pathlib import Path

import pytest
import tiny_run
import torch
from torch import Tensor

import preference_rows
from modelwright.core.config import ConfigError, parse
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.model.decoder import Decoder
from modelwright.objectives.preference import Kto, KtoConfig
from modelwright.parallel.mesh import ParallelConfig, build_mesh, single
from modelwright.train.objective import LaidOutForward, TermSums, WholeModel, forward

BETA, NUM_ANSWERS = 0.3, 12
CONFIG = parse(KtoConfig, {"beta": BETA, "desirable_weight": 1.2, "undesirable_weight": 0.7})


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PackedRows:
    return preference_rows.packed(tmp_path_factory.mktemp("labeled"), preference_rows.labeled(NUM_ANSWERS))


def measured(objective: Kto, batch: TokenBatch, model: Decoder, *, num_parts: int) -> TokenBatch:
    """The batch as the training step gets it."""
    executor = WholeModel(model, single(), scatters_each=False)
    forward_sums = LaidOutForward(executor, build_mesh(single(), ParallelConfig()), num_parts=num_parts)
    return objective.measure(objective.prepare(batch, model), model, forward_sums)


def written_out(model: Decoder) -> tuple[Tensor, dict[str, float]]:
    """The loss and the metrics, each answer in a forward pass of its own (equations 7 and 8 of the paper)."""
    reference = preference_rows.other_model(5, torch.float64)
    ratios, mismatched, labels, logps = list[Tensor](), list[Tensor](), list[bool](), list[float]()
    for own, other in preference_rows.labeled(NUM_ANSWERS):
        with torch.no_grad():
            ref = preference_rows.answer_log_probs(reference, own).sum()
            kl = preference_rows.answer_log_probs(model, other) - preference_rows.answer_log_probs(reference, other)
        log_prob = preference_rows.answer_log_probs(model, own).sum()
        ratios.append(log_prob - ref)
        mismatched.append(kl.sum())
        labels.append(own.value == 1.0)
        logps.append(float(log_prob.detach()))
    kl = max(0.0, float(torch.stack(mismatched).mean()))
    gains = [torch.sigmoid(BETA * (one - kl if good else kl - one)) for one, good in zip(ratios, labels, strict=True)]
    losses = [(1.2 if good else 0.7) * (1 - gain) for gain, good in zip(gains, labels, strict=True)]
    metrics = {"kl": kl}
    for side, wanted in (("chosen", True), ("rejected", False)):
        own = [number for number, good in enumerate(labels) if good == wanted]
        metrics[f"rewards/{side}"] = BETA * sum(float(ratios[one].detach()) for one in own) / len(own)
        metrics[f"logps/{side}"] = sum(logps[one] for one in own) / len(own)
    return torch.stack(losses).mean(), metrics


@pytest.mark.parametrize("seed", [8, 12])
def test_losses_and_gradients_equal_those_written_out(seed: int, rows: PackedRows) -> None:
    objective = Kto(
        PackedLoader(rows, batch_rows=rows.num_groups, seed=1), CONFIG, preference_rows.reference_model(torch.float64)
    )
    model = preference_rows.other_model(seed, torch.float64)
    parameters = list(model.parameters())
    batch = measured(objective, next(rows.batches(rows.num_groups)), model, num_parts=3).padded(rows.num_groups + 2)
    (weight,) = objective.weights(batch).values()
    assert int(weight) == NUM_ANSWERS
    sums = TermSums({"kto": 1 / float(weight)}, objective.metric_names, torch.device("cpu"))
    parts = batch.split(batch.num_groups)
    total = torch.stack([sums.add(objective.losses(forward(model, one), one, model)).sum() for one in parts]).sum()
    gradients = torch.autograd.grad(total, parameters)

    expected, figures = written_out(model)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        assert other.any()
        torch.testing.assert_close(gradient, other, rtol=1e-8, atol=1e-10)
    _, metrics = sums.read(sums.vector.tolist())
    assert metrics == pytest.approx(figures, rel=1e-6)


def test_the_cases_have_a_divergence_above_and_below_zero() -> None:
    divergences = [written_out(preference_rows.other_model(seed, torch.float64))[1]["kl"] for seed in (8, 12)]
    assert min(divergences) == 0.0
    assert max(divergences) > 0.1


def test_the_divergence_is_zero_before_the_first_update(rows: PackedRows) -> None:
    model = preference_rows.other_model(5, torch.float32)
    objective = Kto(PackedLoader(rows, batch_rows=2, seed=1), CONFIG, preference_rows.reference_model(torch.float32))
    batch = measured(objective, next(rows.batches(2)), model, num_parts=1)
    assert float(batch.extras["kl_B"].abs().max()) < 1e-5
    assert not any(name.startswith("mismatched") for name in batch.extras)


def test_padding_changes_no_divergence(rows: PackedRows) -> None:
    model = preference_rows.other_model(8, torch.float64)
    objective = Kto(PackedLoader(rows, batch_rows=2, seed=1), CONFIG, preference_rows.reference_model(torch.float64))
    divergences = [
        measured(objective, next(rows.batches(2)), model, num_parts=parts).extras["kl_B"][0] for parts in (1, 2, 5)
    ]
    assert float(divergences[0]) == pytest.approx(float(divergences[1]))
    assert float(divergences[0]) == pytest.approx(float(divergences[2]))


@pytest.mark.parametrize("name", ["beta", "desirable_weight", "undesirable_weight"])
def test_bad_settings(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be above 0"):
        parse(KtoConfig, {name: 0.0})


@pytest.mark.slow
def test_a_short_run_separates_the_labels(tmp_path: Path) -> None:
    source = preference_rows.loader(tmp_path / "rows", preference_rows.labeled(NUM_ANSWERS))
    objective = Kto(source, KtoConfig(), preference_rows.reference_model(torch.float32))
    model = preference_rows.other_model(5, torch.float32)
    batch = next(iter(source.rows.batches(4)))
    result = tiny_run.run(
        tmp_path / "run", tiny_run.settings(num_steps=8, eval_every_steps=8), model=model, objective=objective,
        heldout=[batch],
    )  # fmt: skip
    figures = result.heldout_metrics
    assert figures["rewards/chosen"] > 0 > figures["rewards/rejected"]
