"""Claim: PPO from a learned reward model raises the true reward over supervised fine-tuning.

The recipe `preference`, in which the true reward is a program: it orders the pairs that the reward model learns from,
and PPO never sees it. Next to it the cheaper use of the same reward model: the best of several answers of the
fine-tuned model. PPO is shorter than in the recipe: what pleases only the reward model is learned later on.
About 10 minutes on two AVX-512 cores, by the CPU time of the parts of one seed.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from modelwright.core.config import derive_seed, merge
from modelwright.model.hf import load_model
from modelwright.objectives.experience import ReferenceModel
from modelwright.objectives.rollouts import win_rates
from modelwright.parallel.mesh import single
from modelwright.train.frozen_model import FrozenModel
from modelwright_claims import product_runs
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.judging import Judgment
from modelwright_claims.product_runs import (
    Answers,
    Asker,
    SeedJob,
    by_seed,
    facts_of,
    make_run,
    pairs_file,
    shared_settings,
)
from modelwright_claims.statistics import differences

SEEDS = (11, 12, 13, 14, 15)
NUM_UPDATES = 64
"""The update with the highest true reward in a run of the recipe with seed 1, which is not one of these seeds:
docs/log/models-and-alignment.md."""
NUM_ANSWERS = 8
BEST_OF = (4, 8)
STAGES = ("clean", "tokenize", "pack", "pretrain", "sft", "reward", "ppo")
TRUE, LEARNED = "true_reward", "reward_model"
"""Terms of the recipe's reward."""
REWARDS = {TRUE: "true reward, ", LEARNED: "reward by the reward model, "}
SFT, PPO = "fine-tuning", "PPO"
WINS, KL, ACCURACY, NUM_PROMPTS = "wins of PPO", "KL from the start", "accuracy of the reward model", "prompts"
GAIN = "gain in true reward"
QUICK: Mapping[str, Any] = {
    "model": {**product_runs.QUICK_SHAPE, "vocab_size": 400}, "tokenizer": {"vocab_size": 400},
    "pretrain": {"num_steps": 2}, "sft": {"num_steps": 20}, "reward": {"num_steps": 20},
    "ppo": {"batch_tokens": 512, "rollout": {"max_completion_length": 24}},
    "validation_tokens": 1024,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PpoJob(SeedJob):
    """A single run. pairs: the file of the pairs."""

    pairs: str
    num_updates: int

    @property
    def key(self) -> dict[str, Any]:
        return {"seed": self.seed, "quick": self.quick, "num_updates": self.num_updates}


def best_of(number: int) -> str:
    return f"best of {number}"


def measure(setting: Setting) -> Measurement:
    """Run the recipe with each seed, and ask the fine-tuned model and that of PPO the same held-out prompts."""
    folder = setting.folder / "alignment"
    pairs = str(pairs_file(folder, "test"))
    seeds, num_updates = (SEEDS[:1], 4) if setting.quick else (SEEDS, NUM_UPDATES)
    jobs = [
        PpoJob(folder=folder, seed=seed, quick=setting.quick, pairs=pairs, num_updates=num_updates) for seed in seeds
    ]
    found = by_seed(setting, one_seed, jobs, sys.modules[__name__], name="ppo_true_reward")
    return measurement(seeds, num_updates, found)


def one_seed(job: PpoJob) -> dict[str, float]:
    """Make one run; its figures. A process's whole work."""
    stage = {"num_steps": job.num_updates, "eval_every_steps": 0, "keep_best": False}
    settings = {
        **shared_settings(job), "name": "ppo-claim", "stages": list(STAGES), "data": {"sources": [job.pairs]},
        "ppo": stage,
    }  # fmt: skip
    run = make_run("preference", merge(settings, QUICK) if job.quick else settings, job.folder / f"ppo-{job.seed}")
    asker, seed = Asker.of(run, "ppo"), derive_seed(job.seed, "claim", "answers")
    prompts, start, end = asker.prompts("heldout"), run.stage("sft").artifact, run.stage("ppo").artifact
    before = asker.ask(start, prompts, num_answers=NUM_ANSWERS, seed=seed)
    after = asker.ask(end, prompts, num_answers=NUM_ANSWERS, seed=seed)
    return {
        **means(SFT, before.rewards_PG),
        **means(PPO, after.rewards_PG),
        **{name: value for number in BEST_OF for name, value in means(best_of(number), best(before, number)).items()},
        WINS: win_rates(after.rewards_PG[TRUE].reshape(-1, 1), before.rewards_PG[TRUE].reshape(-1, 1))[0],
        KL: kl_from(start, after, asker.row_len),
        ACCURACY: float(facts_of(run, "reward")["heldout_pairs"]["accuracy"]),
        NUM_PROMPTS: float(len(prompts)),
    }


def means(model: str, rewards_PG: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean rewards of a model's answers; those without a score are left out."""
    return {f"{title}{model}": float(rewards_PG[term].nanmean()) for term, title in REWARDS.items()}


def best(answers: Answers, number: int) -> dict[str, Tensor]:
    """The rewards of the answer that the reward model likes best among the first `number` to each prompt, [P, 1]."""
    scores_PG = answers.rewards_PG[LEARNED][:, :number]
    chosen_P1 = scores_PG.nan_to_num(-math.inf).argmax(dim=1, keepdim=True)
    return {term: rewards_PG.gather(1, chosen_P1) for term, rewards_PG in answers.rewards_PG.items()}


def kl_from(start: Path, answers: Answers, row_len: int) -> float:
    """Nats per answer: the mean of log p - log p_start over the policy's own answers."""
    reference = ReferenceModel(load=lambda: FrozenModel(load_model(start), single()), row_len=row_len)
    log_ratios_CT = answers.rollout.log_probs_CT - reference.log_probs(answers.rollout, single())
    return float((log_ratios_CT * answers.rollout.mask_CT).sum(dim=1).mean())


def best_of_kl(number: int) -> float:
    """The most that the best of several draws is away from one draw, in nats (Stiennon et al. 2020, appendix G.3)."""
    return math.log(number) - (number - 1) / number


def measurement(seeds: Sequence[int], num_updates: int, runs: Sequence[Mapping[str, float]]) -> Measurement:
    """runs: the figures of each seed."""
    return Measurement(
        samples={name: [run[name] for run in runs] for name in runs[0] if name != NUM_PROMPTS},
        conditions=described(__name__)
        | {
            "seeds": ", ".join(map(str, seeds)),
            "updates of PPO": num_updates,
            "held-out prompts": int(runs[0][NUM_PROMPTS]),
            "pairs": product_runs.SPLITS,
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment, title = Judgment(), REWARDS[TRUE]
    gain = differences(samples[title + PPO], samples[title + SFT])
    judgment.ask(GAIN, gain, "points", ">", 0.0)
    before, after = (statistics.fmean(samples[title + model]) for model in (SFT, PPO))
    judgment.said.append(f"held-out true reward {before:.3f} after fine-tuning, {after:.3f} after PPO")
    for rival, kl in ((best_of(number), best_of_kl(number)) for number in BEST_OF):
        with judgment.part():
            over = differences(samples[title + PPO], samples[title + rival])
            judgment.ask(f"true reward of PPO over {rival}", over, "points", ">=", 0.0)
            judgment.ask(f"KL of {rival}, at most", kl, "nats")
            judgment.said.append(
                f"{rival} by the same reward model {statistics.fmean(samples[title + rival]):.3f} at {kl:.1f} nats "
                f"(PPO {over.mean:+.3f})"
            )
    with judgment.beside():
        learned = differences(samples[REWARDS[LEARNED] + PPO], samples[REWARDS[LEARNED] + SFT])
        wins, kl, accuracy = (statistics.fmean(samples[name]) for name in (WINS, KL, ACCURACY))
        judgment.show(samples, [KL], "nats")
        judgment.show(samples, [ACCURACY], "%", 100)
        judgment.ask("gain by the reward model", learned, "points")
        judgment.show(samples, [WINS], "%", 100)
        judgment.said.append(
            f"PPO's answers win {wins:.0%} at a KL of {kl:.1f} nats; the reward model orders {accuracy:.0%} of "
            f"held-out pairs as the true reward does; its own reward rose by {learned.mean:.1f}"
        )
    judgment.show(samples, [title + model for model in (SFT, PPO, *map(best_of, BEST_OF))], "points")
    return judgment.verdict()


CLAIM = declared(__name__)
