"""GRPO and its variants against a reference that is written out, under layouts, and across stops."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from torch import Tensor

import tiny_rollouts
from distributed import run_distributed
from modelwright.core.config import ConfigError, Stopped
from modelwright.data.rows.batch import IGNORED
from modelwright.model.decoder import Decoder
from modelwright.objectives.advantages import differs, group_advantages, group_stds
from modelwright.objectives.grpo import Grpo, GrpoConfig
from modelwright.objectives.rollouts import Rollout
from modelwright.parallel.mesh import World, single
from modelwright.train.objective import forward
from tolerances import TOLERANCES

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "rollout": {"mask_truncated": True}},
    "rloo": {"baseline": "leave_one_out", "scale_rewards": "none", "beta": 0.05, "loss_type": "grpo"},
    "batch": {"scale_rewards": "batch"},
}


def reference_loss(model: Decoder, start: Decoder, rollout: Rollout, config: GrpoConfig) -> Tensor:
    """The papers' formulas, completion by completion."""
    rewards = rollout.rewards_C.tolist()
    size, total, normalizer = config.num_generations, torch.zeros(()), 0.0
    scored = [value for value in rewards if not math.isnan(value)]
    for row, reward in enumerate(rewards):
        group = rewards[row // size * size : (row // size + 1) * size]
        known = [value for value in group if not math.isnan(value)]
        if math.isnan(reward) or len(known) < 2:
            continue
        if config.baseline == "leave_one_out":
            others = list(known)
            others.remove(reward)
            advantage = reward - sum(others) / len(others)
        else:
            advantage = reward - sum(known) / len(known)
        spread = {"group": known, "batch": scored}.get(config.scale_rewards)
        if spread:
            advantage /= float(torch.tensor(spread, dtype=torch.float64).std()) + 1e-4
        num_tokens = int(rollout.completion_lens_C[row])
        if config.rollout.mask_truncated and num_tokens == tiny_rollouts.MAX_NEW and not rollout.stopped_C[row]:
            continue
        log_probs = tiny_rollouts.completion_log_probs(model, rollout, row)[0]
        ratio = (log_probs - rollout.log_probs_CT[row][rollout.mask_CT[row]]).exp()
        clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon_high)
        gains = torch.minimum(ratio * advantage, clipped * advantage)
        if config.beta:
            with torch.no_grad():
                reference = tiny_rollouts.completion_log_probs(start, rollout, row)[0]
            gains = gains - config.beta * ((reference - log_probs).exp() - (reference - log_probs) - 1)
        if config.loss_type == "grpo":
            total, normalizer = total - gains.mean(), normalizer + 1
        elif config.loss_type == "dapo":
            total, normalizer = total - gains.sum(), normalizer + num_tokens
        else:
            total, normalizer = total - gains.sum(), normalizer + config.rollout.max_completion_length
    return total / normalizer


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_the_papers(name: str) -> None:
    settings = dict(VARIANTS[name])
    settings["rollout"] = {"max_completion_length": tiny_rollouts.MAX_NEW, **settings.get("rollout", {})}
    objective = tiny_rollouts.grpo(num_completions=16, fault=5, **settings)
    rolled: list[Rollout] = []
    roll_out = objective._roll_out

    def keep(whole: Decoder) -> Any:
        rolled.append(roll_out(whole)[0])
        return rolled[0], {}

    objective._roll_out = keep
    batch = next(objective.batches(tiny_rollouts.model(), first=0, rank=0, world_size=1))
    model = tiny_rollouts.changed(tiny_rollouts.model())
    weight = objective.weights(batch)["policy"]
    terms = objective.losses(forward(model, batch), batch, model)
    loss = terms.losses["policy"] / weight
    loss.backward()
    other = tiny_rollouts.changed(tiny_rollouts.model())
    expected = reference_loss(other, tiny_rollouts.model(seed=1), rolled[0], objective.config)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-4, atol=1e-5)
    for (key, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, two.grad, msg=lambda text, key=key: f"{key}: {text}", **TOLERANCES["fp32_gradient"]
        )
    clipped = terms.metrics["clip_ratio/region_mean"]
    assert 0 < float(clipped[0]) < float(clipped[1])
    assert 0 < int((~rolled[0].scored_C).sum()) < 16
    assert 0 < int(rolled[0].stopped_C.sum()) < 16


def test_advantages_of_groups() -> None:
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, nan, 1.0, nan], [3.0, nan, nan, nan], [5.0, 5.0, 5.0, 5.0]])
    plain = group_advantages(rewards, baseline="group_mean", scale="none")
    assert plain[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert plain[1].nan_to_num(9.0).tolist() == [0.5, 9.0, -0.5, 9.0]
    assert plain[2].isnan().all()
    assert plain[3].tolist() == [0.0] * 4
    others = group_advantages(rewards, baseline="leave_one_out", scale="none")
    torch.testing.assert_close(others[0], torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3], dtype=torch.float64))
    assert others[1, [0, 2]].tolist() == [1.0, -1.0]
    scaled = group_advantages(rewards, baseline="group_mean", scale="group")
    torch.testing.assert_close(scaled[0], plain[0] / (rewards[0].double().std() + 1e-4))
    assert scaled[3].tolist() == [0.0] * 4
    stds = group_stds(rewards)
    torch.testing.assert_close(stds[0], rewards[0].double().std())
    assert stds[2].isnan()
    assert stds[3] == 0
    assert differs(rewards).tolist() == [True, True, False, False]
    assert differs(torch.full((1, 3), 0.1)).tolist() == [False]


def test_groups_of_equal_rewards_are_replaced_up_to_the_limit() -> None:
    """Rewards of completions whose length is even are all 1."""
    for rounds, expected in ((0, 1), (3, None)):
        objective = tiny_rollouts.grpo(num_completions=8, resampling_rounds=rounds)
        batch = next(objective.batches(tiny_rollouts.model(), first=0, rank=0, world_size=1))
        experience = objective.buffer.experience
        assert experience is not None
        num_rounds = experience.metrics["sampling/rounds"]
        assert num_rounds == expected if expected else 1 <= num_rounds <= 1 + rounds
        assert int((batch.labels_BT != IGNORED).sum()) == int(experience.mask_CT.sum())
        assert objective.next_place == 2 * num_rounds


class Constant:
    """The same reward for all."""

    name = "even"

    def score(self, samples: Any) -> Any:
        return [tiny_rollouts.Score(1.0) for _ in samples]


@pytest.mark.slow
def test_rollouts_without_a_difference_are_skipped(tmp_path: Path) -> None:
    made = tiny_rollouts.grpo(resampling_rounds=1)
    made.worker.reward.terms = [tiny_rollouts.Term(Constant(), 1.0)]
    before = {name: one.clone() for name, one in tiny_rollouts.model().state_dict().items()}
    weights = tiny_rollouts.train(single(), tmp_path, made, num_steps=2)
    assert all(torch.equal(weights[name], one) for name, one in before.items())


def objective(world: World, dtype: torch.dtype = torch.float32) -> Grpo:
    """Each rollout is learned from in two parts."""
    return tiny_rollouts.grpo(world, dtype=dtype, steps_per_generation=2, loss_type="grpo", beta=0.1)


def in_all_layouts(world: World, folder: Path) -> dict[str, dict[str, Tensor]]:
    several = {"gradient_accumulation_steps": 2, "dtype": torch.float64}
    return {
        name: tiny_rollouts.train(world, folder / name, objective(world, torch.float64), parallel=layout, **several)
        for name, layout in tiny_run.TWO_RANK_LAYOUTS.items()
        if name != "copies"
    }


@pytest.mark.slow
def test_every_layout_learns_what_one_process_does(tmp_path: Path) -> None:
    expected = tiny_rollouts.train(
        single(), tmp_path / "alone", objective(single(), torch.float64), dtype=torch.float64
    )
    records = (tmp_path / "alone" / "metrics.jsonl").read_text()
    for name in ("reward", "reward_std", "kl", "completions/mean_length", "heldout/reward", "heldout_loss"):
        assert f'"{name}"' in records
    assert float(expected["step 0, kl"]) < float(expected["step 3, kl"])
    for found in run_distributed(in_all_layouts, 2, tmp_path):
        for name in found:
            tiny_rollouts.assert_same(found[name], expected, name)


@pytest.mark.slow
def test_a_run_stopped_within_a_rollout_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = tiny_rollouts.train(single(), tmp_path / "whole", objective(single()))
    with pytest.raises(Stopped):
        tiny_rollouts.train(
            single(), tmp_path / "cut", objective(single()), stop=3
        )  # a part of the second rollout is left
    resumed = tiny_rollouts.train(single(), tmp_path / "cut", objective(single()))
    assert "step 2, reward" not in resumed
    assert "step 3, reward" in resumed
    assert all(torch.equal(value, whole[key]) for key, value in resumed.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "num_generations: a group needs at least 2"),
        ({"epsilon": 1.5}, "epsilon: must be between 0 and 1"),
        ({"beta": -1.0}, "beta: must not be negative"),
        ({"num_iterations": 0}, "num_iterations: must be at least 1"),
        ({"rollout": {"max_completion_length": 0}}, "max_completion_length: must be at least 1"),
        ({"batching": {"curriculum": {"by": "length"}}}, "batching: prompts are drawn in random order"),
        ({"num_generations": 5}, "groups of 5 do not make up the 8 completions"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_rollouts.grpo(**settings)
