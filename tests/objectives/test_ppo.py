"""PPO against a reference that is written out, under layouts, and across stops."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

import tiny_rollouts
from distributed import run_distributed
from modelwright.core.config import ConfigError, ModelwrightError, Stopped
from modelwright.data.rows.batch import IGNORED
from modelwright.model.decoder import Decoder
from modelwright.objectives.advantages import (
    clipped_policy_loss,
    clipped_value_loss,
    generalized_advantages,
    kl_k1,
    kl_k2,
    kl_k3,
    whitened,
)
from modelwright.objectives.ppo import KlController, Ppo, PpoConfig, RunningMoments, ValueModel, completion_scores
from modelwright.objectives.rollouts import Rollout
from modelwright.parallel.mesh import World, single
from modelwright.train.build import attach_modules
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import forward
from tolerances import TOLERANCES

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"kl_coef": 0.0},
    "penalized": {"kl_coef": 0.2, "missing_eos_penalty": 0.5, "gamma": 0.97, "lam": 0.9},
    "value model": {"kl_coef": 0.2, "vf_coef": 0.5, "value_model": "reward"},
    "shaped": {"normalize_rewards": True, "reward_clip": 1.0, "whiten_rewards": True, "entropy_coef": 0.01},
}


def with_head(objective: Ppo, seed: int) -> Decoder:
    """A model with a value head that is not zero."""
    model = tiny_rollouts.model()
    attach_modules(model, objective, 0)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    return model


def completion_values(model: Decoder, rollout: Rollout, row: int, hidden_TD: Tensor) -> Tensor:
    """The value before each token of one completion: of the policy's hidden states, or by a model of its own."""
    module = model.heads["value"]
    if not isinstance(module, ValueModel):
        return module(hidden_TD)
    _, _, own_TD = tiny_rollouts.completion_log_probs(module.decoder, rollout, row)
    return own_TD @ module.head.linear.weight[0]


def white(rows: list[list[float]], *, shift: bool) -> list[list[float]]:
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    mean, std = float(flat.mean()), math.sqrt(float(flat.var()) + 1e-8)
    return [[(value - mean) / std + (0.0 if shift else mean) for value in row] for row in rows]


def reference_loss(model: Decoder, old: Decoder, start: Decoder, rollout: Rollout, config: PpoConfig) -> Tensor:
    """The papers' formulas, token by token."""
    rewards = [float(value) for value in rollout.rewards_C]
    rows = [row for row, value in enumerate(rewards) if not math.isnan(value)]
    scores = [rewards[row] - config.missing_eos_penalty * (not rollout.stopped_C[row]) for row in rows]
    if config.normalize_rewards:
        all_scores = torch.tensor(scores, dtype=torch.float64)
        scores = [(score - float(all_scores.mean())) / float(all_scores.std()) for score in scores]
    if config.reward_clip:
        scores = [min(config.reward_clip, max(-config.reward_clip, score)) for score in scores]
    old_log_probs, values, token_rewards = [], [], []
    with torch.no_grad():
        for row, score in zip(rows, scores, strict=True):
            log_probs, _, hidden = tiny_rollouts.completion_log_probs(old, rollout, row)
            reference, _, _ = tiny_rollouts.completion_log_probs(start, rollout, row)
            penalties = (-config.kl_coef * (log_probs - reference)).tolist()
            penalties[-1] += score
            old_log_probs.append(log_probs)
            values.append(completion_values(old, rollout, row, hidden).tolist())
            token_rewards.append(penalties)
    if config.whiten_rewards:
        token_rewards = white(token_rewards, shift=False)
    advantages, returns = [], []
    for of_tokens, of_values in zip(token_rewards, values, strict=True):
        following = [*of_values[1:], 0.0]
        pairs = zip(of_tokens, of_values, following, strict=True)
        deltas = [reward + config.gamma * after - value for reward, value, after in pairs]
        decay = config.gamma * config.lam
        sums = [sum(decay**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
        advantages.append(sums)
        returns.append([one + value for one, value in zip(sums, of_values, strict=True)])
    policy_total, value_total, num_tokens = torch.zeros(()), torch.zeros(()), 0
    for place, (row, weights) in enumerate(zip(rows, white(advantages, shift=True), strict=True)):
        log_probs, entropies, hidden = tiny_rollouts.completion_log_probs(model, rollout, row)
        new_values = completion_values(model, rollout, row, hidden)
        for t, weight in enumerate(weights):
            ratio = (log_probs[t] - old_log_probs[place][t]).exp()
            gain = torch.minimum(ratio * weight, ratio.clamp(1 - config.cliprange, 1 + config.cliprange) * weight)
            policy_total = policy_total - gain - config.entropy_coef * entropies[t]
            value, before = new_values[t], values[place][t]
            near = value.clamp(before - config.cliprange_value, before + config.cliprange_value)
            errors = ((value - returns[place][t]) ** 2, (near - returns[place][t]) ** 2)
            value_total = value_total + 0.5 * torch.maximum(*errors)
            num_tokens += 1
    return (policy_total + config.vf_coef * value_total) / num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_the_papers(name: str) -> None:
    objective = tiny_rollouts.ppo(fault=5, **VARIANTS[name])
    rolled: list[Rollout] = []
    roll_out = objective.roll_out

    def keep(model: Decoder, num_prompts: int, *, num_generations: int) -> Rollout:
        rolled.append(roll_out(model, num_prompts, num_generations=num_generations))
        return rolled[0]

    objective.roll_out = keep
    old = with_head(objective, 1)
    batch = next(objective.batches(old, first=0, rank=0, world_size=1))
    model, other = (tiny_rollouts.changed(with_head(objective, 1)) for _ in range(2))
    weights = objective.weights(batch)
    terms = objective.losses(forward(model, batch), batch, model)
    loss = sum((terms.losses[key] / weights[key] for key in weights), torch.zeros(()))
    loss.backward()
    expected = reference_loss(other, old, tiny_rollouts.model(seed=1), rolled[0], objective.config)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for (key, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, two.grad, msg=lambda text, key=key: f"{key}: {text}", **TOLERANCES["fp32_gradient"]
        )
    for figure in ("policy/clipfrac_avg", "val/clipfrac_avg"):
        assert 0 < float(terms.metrics[figure][0]) < float(terms.metrics[figure][1])
    assert 0 < int((~rolled[0].scored_C).sum()) < 8


def test_before_the_first_update_nothing_differs() -> None:
    """KL from the policy itself is 0, ratios are 1, and values are 0."""
    objective = tiny_rollouts.ppo()
    objective.reference.load = lambda: FrozenModel(tiny_rollouts.model(), single())
    model = tiny_rollouts.model()
    attach_modules(model, objective, 0)
    batch = next(objective.batches(model, first=0, rank=0, world_size=1))
    found = objective.losses(forward(model, batch), batch, model).metrics
    figures = {name: float(total / count) for name, (total, count) in found.items() if count}
    assert abs(figures["objective/kl"]) < 1e-4
    assert figures["policy/approxkl_avg"] < 1e-8
    assert abs(figures["val/ratio"] - 1) < 1e-4
    assert figures["policy/clipfrac_avg"] == 0
    assert not batch.extras["old_values_BT"].any()
    of_evaluations = {name for name in objective.metric_names if name.endswith("/win_rate")}
    assert set(figures) == set(objective.metric_names) - of_evaluations


def test_advantages_follow_from_rewards_and_values() -> None:
    rewards, values = torch.tensor([[9.0, 1.0, 2.0, 9.0]]), torch.tensor([[9.0, 0.5, 1.0, 9.0]])
    mask = torch.tensor([[False, True, True, False]])
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.5)
    last = 2.0 - 1.0
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 1.0 + 0.9 * 1.0 - 0.5 + 0.45 * last, last, 0.0]]))
    torch.testing.assert_close(returns[0, 1:3], advantages[0, 1:3] + values[0, 1:3])
    kept = whitened(advantages, mask)[mask]
    torch.testing.assert_close(torch.stack([kept.mean(), kept.var()]), torch.tensor([0.0, 1.0]))
    assert not whitened(advantages, mask)[~mask].any()


def test_terms_of_single_tokens() -> None:
    old, advantages = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0])
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5])
    found = clipped_policy_loss(ratios.log(), old, advantages, low=0.2, high=0.3)
    torch.testing.assert_close(found.losses, torch.tensor([-1.3, -0.5, 1.5, 0.8]))
    assert found.clipped_high.tolist() == [True, False, False, False]
    assert found.clipped_low.tolist() == [False, False, False, True]
    losses, clipped = clipped_value_loss(
        torch.tensor([2.0, 0.1]), torch.zeros(2), torch.tensor([0.0, 1.0]), cliprange=0.2
    )
    torch.testing.assert_close(losses, torch.tensor([2.0, 0.405]))
    assert not clipped.any()
    policy, reference = torch.tensor([0.2, 0.5, 0.3]).log(), torch.tensor([0.3, 0.4, 0.3]).log()
    exact = (policy.exp() * (policy - reference)).sum()
    for estimate in (kl_k1, kl_k3):  # unbiased: their mean under the policy is the divergence
        torch.testing.assert_close((policy.exp() * estimate(policy, reference)).sum(), exact)
    assert (kl_k3(policy, reference) >= 0).all()
    assert (kl_k2(policy, reference) >= 0).all()


def test_the_controller_leads_the_kl_to_its_target() -> None:
    controller = KlController(coefficient=0.1, target=6.0, horizon=100)
    controller.update(60.0, 10)
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    controller.update(5.7, 10)
    assert controller.coefficient == pytest.approx(0.1 * 1.02 * (1 - 0.05 * 10 / 100))
    fixed = KlController(coefficient=0.1, target=0.0, horizon=100)
    fixed.update(60.0, 10)
    assert fixed.coefficient == 0.1


def test_moments_of_batches_are_those_of_all_scores() -> None:
    scores, moments = torch.randn(50, dtype=torch.float64), RunningMoments()
    for part in scores.split([1, 20, 0, 29]):
        moments.add(part)
    assert (moments.mean, moments.std) == pytest.approx((float(scores.mean()), float(scores.std())))
    assert RunningMoments().std == 1.0


def test_scores_are_penalized_and_clipped() -> None:
    objective = tiny_rollouts.ppo()
    rollout = objective.roll_out(tiny_rollouts.model(), 8, num_generations=1)
    plain = completion_scores(rollout, None, clip=0.0, missing_eos_penalty=1.0)
    torch.testing.assert_close(plain, rollout.rewards_C - (~rollout.stopped_C).double())
    assert completion_scores(rollout, None, clip=0.25, missing_eos_penalty=1.0).abs().max() == 0.25


def objective(world: World, dtype: torch.dtype = torch.float32) -> Ppo:
    """Each rollout is learned from in two epochs of two parts, and everything that has a state is on."""
    return tiny_rollouts.ppo(
        world,
        dtype=dtype,
        num_completions=4,
        num_ppo_epochs=2,
        num_mini_batches=2,
        kl_target=1.0,
        kl_horizon=50,
        normalize_rewards=True,
        entropy_coef=0.01,
    )


def in_all_layouts(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    several = {"gradient_accumulation_steps": 2, "dtype": torch.float64, "num_steps": 6}
    return {
        name: tiny_rollouts.train(world, folder / name, objective(world, torch.float64), parallel=layout, **several)
        for name, layout in tiny_run.TWO_RANK_LAYOUTS.items()
        if name != "copies"
    }


@pytest.mark.slow
def test_every_layout_learns_what_one_process_does(tmp_path: Path) -> None:
    expected = tiny_rollouts.train(
        single(), tmp_path / "alone", objective(single(), torch.float64), dtype=torch.float64, num_steps=6
    )
    assert bool(expected["heads.value.linear.weight"].any())
    assert float(expected["step 4, objective/kl_coef"]) != 0.05
    for found in run_distributed(in_all_layouts, 2, tmp_path):
        for name in found:
            tiny_rollouts.assert_same(found[name], expected, name)


@pytest.mark.slow
def test_a_run_stopped_within_an_epoch_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = tiny_rollouts.train(single(), tmp_path / "whole", objective(single()), num_steps=6)
    with pytest.raises(Stopped):
        tiny_rollouts.train(single(), tmp_path / "cut", objective(single()), stop=3, num_steps=6)
    resumed = tiny_rollouts.train(single(), tmp_path / "cut", objective(single()), num_steps=6)
    assert "step 2, reward" not in resumed
    assert "step 3, reward" in resumed
    assert all(torch.equal(value, whole[key]) for key, value in resumed.items())


@pytest.mark.slow
def test_an_update_that_goes_too_far_ends_the_rollout(tmp_path: Path) -> None:
    made = tiny_rollouts.ppo(num_ppo_epochs=4, target_kl=1e-3)
    found = tiny_rollouts.train(single(), tmp_path, made)
    too_far = [float(found[f"step {step}, policy/approxkl_avg"]) > 1e-3 for step in range(4)]
    assert not too_far[0]  # the first update of a rollout learns from what the policy generated
    rollouts = [float(found[f"step {step}, objective/scores"]) for step in range(4)]
    begun = [step for step in range(1, 4) if rollouts[step] != rollouts[step - 1]]
    assert begun == [step for step in range(1, 4) if too_far[step - 1]]
    assert begun


@pytest.mark.slow
def test_a_reward_that_never_scores_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(ModelwrightError, match="reward even: none of 8 answers has a score"):
        tiny_rollouts.train(single(), tmp_path, tiny_rollouts.ppo(fault=1), num_steps=2)


def test_the_batch_of_an_update_predicts_completions_alone() -> None:
    made = tiny_rollouts.ppo(num_mini_batches=2, num_completions=3)
    model = tiny_rollouts.model()
    attach_modules(model, made, 0)
    batches = made.batches(model, first=0, rank=0, world_size=1)
    counts = [int((next(batches).labels_BT != IGNORED).sum()) for _ in range(2)]
    assert made.buffer.experience is not None
    assert sum(counts) == int(made.buffer.experience.mask_CT.sum())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ppo_epochs": 0}, "num_ppo_epochs: must be at least 1"),
        ({"lam": 1.5}, "lam: must be from 0 to 1"),
        ({"cliprange": 1.0}, "cliprange: must be between 0 and 1"),
        ({"vf_coef": -0.1}, "vf_coef: must not be negative"),
        ({"kl_coef": 0.0, "kl_target": 6.0}, "kl_target: adapts kl_coef, which is 0"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_rollouts.ppo(**settings)
