"""Rollouts from which little can be learned, and rollouts of the policy that is trained: no correction is needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_rollouts
from modelwright.data.rows.batch import IGNORED
from modelwright.objectives.experience import RowPlan, completion_batch
from modelwright.objectives.grpo import Grpo
from modelwright.objectives.ppo import Ppo
from modelwright.objectives.rollouts import Rollout, win_rates
from modelwright.parallel.mesh import single
from modelwright.reward.build import Term
from modelwright.reward.reward import Sample, Score
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.objective import forward


@dataclass(frozen=True)
class Endless:
    """The tokenizer without its stop tokens: no completion ends by itself."""

    stop_ids: tuple[int, ...] = ()
    vocab_size: int = 263

    def decode(self, ids: list[int]) -> str:
        return tiny_rollouts.tokenizer().decode(ids)


class Constant:
    """The same reward for all."""

    name = "even"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(0.3) for _ in samples]


def endless(objective: Grpo | Ppo) -> Any:
    tokenizer: Any = Endless()
    objective.worker = replace(objective.worker, tokenizer=tokenizer)
    return objective


def initial() -> dict[str, Tensor]:
    return {name: one.clone() for name, one in tiny_rollouts.model().state_dict().items()}


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Completions of the model itself."""
    worker = tiny_rollouts.worker()
    return worker.roll_out(tiny_rollouts.model(), single(), range(4), num_generations=3, stream=("test",))


@pytest.mark.parametrize("num_parts", [1, 2, 100])
@pytest.mark.parametrize("row_len", [32, 48, 64])
def test_the_trainer_and_the_engine_agree_at_any_packing_and_microbatch(
    rollout: Rollout, row_len: int, num_parts: int
) -> None:
    """So the ratio of an update on what the policy generated is 1, and off-policy correction would change nothing."""
    model = tiny_rollouts.model()
    plan = RowPlan.of(rollout.lens_C - 1, row_len)
    batch = completion_batch(rollout.ids_CL, rollout.mask_CT, plan)
    parts = batch.split(min(num_parts, batch.num_rows))
    assert len(parts) == min(num_parts, plan.num_rows)
    with torch.no_grad():
        log_probs_BR = torch.cat([model.token_log_probs(forward(model, one), one.labels_BT) for one in parts])
    ratios_CT = (plan.taken(log_probs_BR, rollout.mask_CT.shape[1]) - rollout.log_probs_CT).exp()
    assert (ratios_CT - 1)[rollout.mask_CT].abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_the_first_update_of_a_rollout_is_on_policy(num_microbatches: int, tmp_path: Path) -> None:
    made = {"ppo": tiny_rollouts.ppo(num_ppo_epochs=2), "grpo": tiny_rollouts.grpo(beta=0.1, num_iterations=2)}
    for name, objective in made.items():
        objective.reference.load = lambda: FrozenModel(tiny_rollouts.model(), single())
        found = tiny_rollouts.train(
            single(), tmp_path / name, objective, num_steps=3, gradient_accumulation_steps=num_microbatches
        )
        if name == "ppo":
            assert abs(float(found["step 0, objective/kl"])) < 1e-4
            for step in (0, 2):  # the first update of either rollout
                assert abs(float(found[f"step {step}, val/ratio"]) - 1) < 1e-5
                assert float(found[f"step {step}, policy/approxkl_avg"]) < 1e-9
                assert float(found[f"step {step}, policy/clipfrac_avg"]) == 0
            assert abs(float(found["step 2, objective/kl"])) > 1e-4
            assert float(found["step 1, policy/approxkl_avg"]) > 1e-8
        else:
            assert abs(float(found["step 0, kl"])) < 1e-8
            assert float(found["step 0, clip_ratio/region_mean"]) == 0
            assert float(found["step 1, kl"]) > 1e-8


def test_completions_that_never_end_are_cut_and_counted(tmp_path: Path) -> None:
    made = endless(tiny_rollouts.ppo(missing_eos_penalty=2.0))
    found = tiny_rollouts.train(single(), tmp_path / "ppo", made, num_steps=1)
    assert float(found["step 0, completions/clipped_ratio"]) == 1
    assert float(found["step 0, completions/min_length"]) == tiny_rollouts.MAX_NEW
    assert float(found["step 0, val/num_eos_tokens"]) == 0
    penalized = float(found["step 0, objective/scores"])
    assert penalized == pytest.approx(float(found["step 0, reward"]) - 2)


def test_nothing_is_learned_from_completions_that_never_end_where_they_are_left_out(tmp_path: Path) -> None:
    limits = {"max_completion_length": tiny_rollouts.MAX_NEW, "mask_truncated": True}
    found = tiny_rollouts.train(single(), tmp_path, endless(tiny_rollouts.grpo(rollout=limits)), num_steps=2)
    assert float(found["step 1, completions/clipped_ratio"]) == 1
    assert all(torch.equal(found[name], one) for name, one in initial().items())


def test_equal_rewards_teach_a_group_nothing_and_are_counted(tmp_path: Path) -> None:
    made = tiny_rollouts.grpo()
    made.worker.reward.terms = [Term(Constant(), 1.0)]
    found = tiny_rollouts.train(single(), tmp_path, made, num_steps=2)
    assert float(found["step 1, frac_reward_zero_std"]) == 1
    assert float(found["step 1, reward_std"]) == pytest.approx(0.0, abs=1e-9)
    assert all(torch.equal(found[name], one) for name, one in initial().items())


def test_of_an_empty_answer_the_end_token_is_learned(rollout: Rollout) -> None:
    """A completion that is the end token alone."""
    stop_id = tiny_rollouts.tokenizer().stop_ids[0]
    begin = int(rollout.prompt_lens_C[0])
    ids_CL = rollout.ids_CL[:1].clone()
    ids_CL[0, begin], ids_CL[0, begin + 1 :] = stop_id, 0
    short = replace(rollout.take(torch.tensor([0])), ids_CL=ids_CL, lens_C=torch.tensor([begin + 1]))
    assert int(short.mask_CT.sum()) == 1
    batch = completion_batch(short.ids_CL, short.mask_CT, RowPlan.of(short.lens_C - 1, 48))
    assert batch.labels_BT[batch.labels_BT != IGNORED].tolist() == [stop_id]


def test_win_rates_leave_out_what_was_not_scored() -> None:
    nan = torch.nan
    first = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, nan], [1.0, 1.0]])
    now = torch.tensor([[1.0, 1.0], [0.0, 0.0], [nan, 5.0], [0.0, nan]])
    assert win_rates(now, first) == [0.5, 0.25]
    assert win_rates(first[:, :1], first[:, :1]) == [0.5]
    assert all(rate != rate for rate in win_rates(torch.full((2, 1), nan), first[:2, :1]))
