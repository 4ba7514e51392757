"""Losses and metrics of fine-tuning, of adapters and of alignment, step by step, beside those of TRL and PEFT on
the same model, data and seed.

    python benchmarks/trl_losses.py --steps 30 [--only NAME ...]

needs `pip install trl peft` (TRL 1.16 was used); `ppo` and `ppo, value model` need a TRL that still has it, `pip
install 'trl==1.12.*'`, and are left out of another. A Llama of 2 layers and width 64 in FP32, AdamW, a constant rate,
no clipping. TRL pads one answer to a row; ours are packed, several to a row. What learns from rollouts generates on
our side, and TRL learns from the same completions. Prints the largest difference of each figure over all steps,
relative to its largest value, and ends with an error if one is above its bound.
"""

import argparse
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports] - comes with trl
from peft import PeftModel  # pyright: ignore[reportMissingImports]
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from trl import (  # pyright: ignore[reportMissingImports]
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # pyright: ignore[reportMissingImports]

from modelwright.core.config import parse
from modelwright.data.rows.examples import PromptedAnswer, PromptRecord
from modelwright.data.rows.pack import TokenSequence
from modelwright.model.adapters import attach_adapters
from modelwright.model.hf import load_model, load_sequence_classifier
from modelwright.model.peft_folder import save_adapter
from modelwright.objectives.experience import ReferenceModel
from modelwright.objectives.grpo import Grpo, GrpoConfig
from modelwright.objectives.next_token import NextToken
from modelwright.objectives.ppo import Ppo, PpoConfig, ValueOnTrunk, separate_value_model
from modelwright.objectives.preference import (
    HEAD,
    Kto,
    KtoConfig,
    Preference,
    PreferenceConfig,
    RewardModelConfig,
    RewardModeling,
)
from modelwright.objectives.rollouts import HeldoutRewards, Rollout, RolloutConfig, RolloutWorker
from modelwright.parallel.mesh import single
from modelwright.reward.build import Term, WeightedSum
from modelwright.reward.reward import Sample, Score
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import FrozenModel
from trl_setup import (
    BATCH,
    EOS,
    PAD,
    SEED,
    SEQ_LEN,
    SHARED,
    VOCABULARY,
    InOrder,
    Records,
    answers,
    llama,
    margins,
    ours,
    text,
    theirs,
    tokenizer,
    trl_settings,
)

BOUNDS = {"loss": 1e-4}
OTHER_BOUND = 1e-3
"""Largest relative differences. Both sides compute in FP32 and add up in another order; margins are small differences
of log-probabilities of about 50 nats."""


def pair_groups(pairs: Sequence[tuple[PromptedAnswer, PromptedAnswer]]) -> list[tuple[TokenSequence, TokenSequence]]:
    values = margins(len(pairs))
    return [
        (TokenSequence(a.ids, a.mask, value=value), TokenSequence(b.ids, b.mask, value=value))
        for (a, b), value in zip(pairs, values, strict=True)
    ]


def pair_texts(pairs: Sequence[tuple[PromptedAnswer, PromptedAnswer]]) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": text(a.ids[: a.prompt_len]), "chosen": text(a.ids[a.prompt_len :]),
             "rejected": text(b.ids[b.prompt_len :])}
            for a, b in pairs
        ]
    )  # fmt: skip


def preference(
    folder: Path, steps: int, changes: Mapping[str, Any], trl_changes: Mapping[str, Any]
) -> tuple[Records, Records]:
    """DPO and its relatives on pairs."""
    start = llama(folder / "model", LlamaForCausalLM)
    is_orpo = changes["loss"] == "orpo"
    pairs = answers(steps * BATCH, prompt_len=1 if is_orpo else 6)  # TRL's ORPO has the prompt in its likelihood, too
    config = parse(PreferenceConfig, {**SHARED, **changes, "num_steps": steps}, constants=True)
    reference = None if is_orpo else FrozenModel(load_model(start), single())
    objective = Preference(InOrder(pair_groups(pairs), folder / "rows"), config, reference)
    own = ours(objective, load_model(start), config, folder / "ours")
    arguments = {**trl_settings(folder / "trl", steps), **trl_changes}
    model = LlamaForCausalLM.from_pretrained(start)
    data = {"model": model, "train_dataset": pair_texts(pairs), "processing_class": tokenizer()}
    if is_orpo:
        return own, theirs(ORPOTrainer(args=ORPOConfig(max_length=SEQ_LEN, **arguments), **data))
    return own, theirs(DPOTrainer(args=DPOConfig(**arguments), **data))


def sft(folder: Path, steps: int, lora: Mapping[str, Any]) -> tuple[Records, Records]:
    """Fine-tuning on answers; with adapters, PEFT starts from ours."""
    start = llama(folder / "model", LlamaForCausalLM)
    singles = [one for one, _ in answers(steps * BATCH, prompt_len=6)]
    config = parse(TrainConfig, {**SHARED, "lora": dict(lora), "num_steps": steps}, constants=True)
    objective = NextToken(InOrder([(TokenSequence(a.ids, a.mask),) for a in singles], folder / "rows"))
    model = LlamaForCausalLM.from_pretrained(start)
    if lora:
        adapted = load_model(start)
        attach_adapters(adapted, config.lora, SEED)
        save_adapter(adapted, folder / "adapter", base=str(start))
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    own = ours(objective, load_model(start), config, folder / "ours")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(max_length=SEQ_LEN, **trl_settings(folder / "trl", steps)),
        train_dataset=Dataset.from_list(
            [{"prompt": text(a.ids[: a.prompt_len]), "completion": text(a.ids[a.prompt_len :])} for a in singles]
        ),
        processing_class=tokenizer(),
    )
    return own, theirs(trainer)


def kto(folder: Path, steps: int) -> tuple[Records, Records]:
    """Answers with labels; the mismatched ones are TRL's, which rotates them within each batch."""
    start = llama(folder / "model", LlamaForCausalLM)
    singles = [a for a, _ in answers(steps * BATCH, prompt_len=6)]
    labels = [number % 3 > 0 for number in range(len(singles))]
    groups = []
    for number, (one, label) in enumerate(zip(singles, labels, strict=True)):
        first = number - number % BATCH
        other = one.answered_by(singles[first + (number - first - 1) % BATCH], seq_len=SEQ_LEN)
        groups.append(tuple(TokenSequence(x.ids, x.mask, value=float(label)) for x in (one, other)))
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.8}
    config = parse(KtoConfig, {**SHARED, **weights, "num_steps": steps}, constants=True)
    objective = Kto(InOrder(groups, folder / "rows"), config, FrozenModel(load_model(start), single()))
    own = ours(objective, load_model(start), config, folder / "ours")
    data = Dataset.from_list(
        [
            {"prompt": text(one.ids[: one.prompt_len]), "completion": text(one.ids[one.prompt_len :]), "label": label}
            for one, label in zip(singles, labels, strict=True)
        ]
    )
    trainer = KTOTrainer(
        model=LlamaForCausalLM.from_pretrained(start),
        args=KTOConfig(**weights, **trl_settings(folder / "trl", steps)),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    return own, theirs(trainer)


def reward(folder: Path, steps: int) -> tuple[Records, Records]:
    """A reward model with margins and centering."""
    start = llama(folder / "model", LlamaForSequenceClassification)
    pairs = answers(steps * BATCH, prompt_len=6)
    center = {"center_rewards_coefficient": 0.05}
    config = parse(RewardModelConfig, {**SHARED, **center, "use_margins": True, "num_steps": steps}, constants=True)
    objective = RewardModeling(InOrder(pair_groups(pairs), folder / "rows"), config)
    own = ours(objective, load_sequence_classifier(start, head=HEAD), config, folder / "ours")
    data = Dataset.from_list(
        [
            {"chosen_ids": a.ids.tolist(), "rejected_ids": b.ids.tolist(), "margin": margin}
            for (a, b), margin in zip(pairs, margins(len(pairs)), strict=True)
        ]
    )
    trainer = RewardTrainer(
        model=LlamaForSequenceClassification.from_pretrained(start),
        args=RewardConfig(**center, **trl_settings(folder / "trl", steps)),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    return own, theirs(trainer)


NUM_PROMPTS, GROUP, ROLLOUT_LEN, EPOCHS = 4, 4, 12, 2
"""Prompts of a rollout, completions of each prompt, most tokens of a completion, and how often it is learned from."""
NUM_COMPLETIONS = NUM_PROMPTS * GROUP


@dataclass(frozen=True)
class Words:
    """What rollouts need of a tokenizer."""

    stop_ids: tuple[int, ...]
    vocab_size: int = VOCABULARY

    def decode(self, ids: Sequence[int]) -> str:
        return text(np.array(ids, dtype=np.int64))


def even_share(ids: Sequence[int]) -> float:
    """The share of even tokens among those of an answer, without the end token."""
    counted = [one for one in ids if one != EOS]
    return sum(one % 2 == 0 for one in counted) / max(1, len(counted))


class EvenWords:
    """`even_share` as one of our rewards, which see text."""

    name = "even"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(even_share([int(word[1:]) for word in sample.answer.split()])) for sample in samples]


def rollout_parts(start: Path, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    """What our objectives that roll out are made of."""
    singles = [one for one, _ in answers(64, prompt_len=6)]
    prompts = [
        PromptRecord(ids=(ids := one.ids[: one.prompt_len]).tolist(), messages=[{"role": "user", "content": text(ids)}])
        for one in singles
    ]
    words: Any = Words(stop_ids)
    worker = RolloutWorker(
        prompts=prompts,
        tokenizer=words,
        reward=WeightedSum([Term(EvenWords(), 1.0)]),
        config=RolloutConfig(max_completion_length=ROLLOUT_LEN),
        seed=SEED,
    )
    return {
        "worker": worker,
        "heldout": HeldoutRewards(worker=worker),
        "reference": ReferenceModel(load=lambda: FrozenModel(load_model(start), single()), row_len=SEQ_LEN),
        "num_completions": NUM_COMPLETIONS,
        "row_len": SEQ_LEN,
    }


def recorded(objective: Any) -> list[Rollout]:
    """The rollouts of an objective, once it is trained."""
    rollouts: list[Rollout] = []
    roll_out = objective.roll_out

    def keep(*args: Any, **more: Any) -> Rollout:
        rollouts.append(roll_out(*args, **more))
        return rollouts[-1]

    objective.roll_out = keep
    return rollouts


def prompt_and_completion(rollout: Rollout, row: int) -> tuple[list[int], list[int]]:
    begin, end = int(rollout.prompt_lens_C[row]), int(rollout.lens_C[row])
    ids = rollout.ids_CL[row, :end].tolist()
    return ids[:begin], ids[begin:]


def grpo(folder: Path, steps: int, changes: Mapping[str, Any]) -> tuple[Records, Records]:
    """TRL learns from our completions, which its hook for custom rollouts takes, and scores them itself. Its KL is that
    of the papers here: by default TRL multiplies it by the ratio of probabilities.
    """
    start = llama(folder / "model", LlamaForCausalLM)
    settings = {"num_generations": GROUP, "num_iterations": EPOCHS, **changes}
    config = parse(
        GrpoConfig,
        {**SHARED, **settings, "num_steps": steps, "rollout": {"max_completion_length": ROLLOUT_LEN}},
        constants=True,
    )
    objective = Grpo(config=config, **rollout_parts(start, (PAD, EOS)))
    rollouts = recorded(objective)
    own = ours(objective, load_model(start), config, folder / "ours")
    rows = [[prompt_and_completion(rollout, row) for row in range(NUM_COMPLETIONS)] for rollout in rollouts]
    prompts = [text(np.array(prompt)) for one in rows for prompt, _ in one[::GROUP]]
    replayed = iter(rows)

    def replay(asked: list[str], trainer: Any) -> dict[str, Any]:
        both = next(replayed)
        assert asked == [text(np.array(prompt)) for prompt, _ in both]
        return {"prompt_ids": [a for a, _ in both], "completion_ids": [b for _, b in both], "logprobs": None}

    def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [even_share(ids) for ids in completion_ids]

    shared = {**trl_settings(folder / "trl", steps), "per_device_train_batch_size": NUM_COMPLETIONS}
    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(start),
        reward_funcs=even,
        args=GRPOConfig(
            max_completion_length=ROLLOUT_LEN, shuffle_dataset=False, use_bias_correction_kl=False, **settings, **shared
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer(),
        rollout_func=replay,
    )
    return own, theirs(trainer)


def on_trunk(policy: LlamaForCausalLM) -> LlamaForSequenceClassification:
    """TRL's value model with the policy's own layers and a head that begins with zero."""
    value_model = LlamaForSequenceClassification(policy.config)
    value_model.model, value_model.score = policy.model, torch.nn.Linear(policy.config.hidden_size, 1)
    torch.nn.init.zeros_(value_model.score.weight)
    torch.nn.init.zeros_(value_model.score.bias)
    return value_model


def separate(reward_model: Path) -> LlamaForSequenceClassification:
    value_model = LlamaForSequenceClassification.from_pretrained(reward_model)
    value_model.model.embed_tokens.padding_idx = None
    return value_model


def ppo(folder: Path, steps: int, value_model: str) -> tuple[Records, Records]:
    """Means over the epochs of each rollout. TRL's generation and reward model are replaced by our completions and
    scores. No completion ends by itself: after one that does, TRL gives the score to a place of its own behind the end
    token, and ours to the end token. value_model: as in our settings; `reward` is a model of its own on both sides.
    """
    trl_ppo = importlib.import_module("trl.experimental.ppo.ppo_trainer")
    start = llama(folder / "model", LlamaForCausalLM)
    settings = {"num_ppo_epochs": EPOCHS, "kl_coef": 0.1, "vf_coef": 0.5, "gamma": 0.97, "lam": 0.9}
    settings |= {"cliprange": 0.1, "cliprange_value": 0.02}
    config = parse(
        PpoConfig,
        {**SHARED, **settings, "value_model": value_model, "num_steps": steps,
         "rollout": {"max_completion_length": ROLLOUT_LEN}},
        constants=True,
    )  # fmt: skip
    reward_model = llama(folder / "reward", LlamaForSequenceClassification, seed=SEED + 1)
    value = ValueOnTrunk() if value_model == "head" else separate_value_model(reward_model)
    objective = Ppo(config=config, value=value, **rollout_parts(start, ()))
    rollouts = recorded(objective)
    own = ours(objective, load_model(start), config, folder / "ours")
    rows = [[prompt_and_completion(rollout, row) for row in range(NUM_COMPLETIONS)] for rollout in rollouts]
    generated, scored = iter(rows), iter(rollouts)

    def generate(model: Any, queries: torch.Tensor, batch_size: int, pad_id: int, config: Any) -> Any:
        both = next(generated)
        assert [[one for one in query if one != pad_id] for query in queries.tolist()] == [a for a, _ in both]
        ids = torch.cat([queries, torch.tensor([completion for _, completion in both])], dim=1)
        return ids, trl_ppo.forward(model, ids, pad_id).logits[:, queries.shape[1] - 1 : -1]

    policy = LlamaForCausalLM.from_pretrained(start)
    policy.model.embed_tokens.padding_idx = None  # which would leave the vector of token 0 as it is
    judge = LlamaForSequenceClassification(policy.config)
    get_reward = trl_ppo.get_reward

    def scores(model: Any, *args: Any) -> Any:
        return (None, next(scored).rewards_C.float(), None) if model is judge else get_reward(model, *args)

    words = tokenizer(pad_id=VOCABULARY)  # a token that the model cannot generate: TRL masks it wherever it stands
    words.padding_side = "left"
    data = Dataset.from_list([{"input_ids": prompt} for one in rows for prompt, _ in one])
    shared = {**trl_settings(folder / "trl", steps), "per_device_train_batch_size": NUM_COMPLETIONS}
    trainer = trl_ppo.PPOTrainer(
        args=trl_ppo.PPOConfig(
            total_episodes=len(data), response_length=ROLLOUT_LEN, temperature=1.0, num_sample_generations=0,
            **settings, **shared,
        ),
        processing_class=words, model=policy, ref_model=None, reward_model=judge, train_dataset=data,
        value_model=on_trunk(policy) if value_model == "head" else separate(reward_model),
    )  # fmt: skip
    trainer.dataloader = torch.utils.data.DataLoader(cast(Any, data), NUM_COMPLETIONS, collate_fn=trainer.data_collator)
    with mock.patch.multiple(trl_ppo, batch_generation=generate, get_reward=scores):
        trainer.train()
    logs = [log for log in trainer.state.log_history if "objective/kl" in log]
    names = [name for name in logs[0] if name in own[0] and name not in INCOMPARABLE]
    epochs = [own[first : first + EPOCHS] for first in range(0, len(own), EPOCHS)]
    return [{name: float(np.mean([one[name] for one in each])) for name in names} for each in epochs], logs


INCOMPARABLE = ("step", "epoch", "learning_rate", "grad_norm", "num_tokens", "reward_std", "val/num_eos_tokens")
"""Names that both have for other figures: of GRPO, `reward_std` of TRL is that of all completions, ours the mean over
groups; of PPO, TRL counts end tokens wherever they stand."""
PREFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpo": ({"loss": "sigmoid", "beta": 0.1}, {"beta": 0.1}),
    "dpo, per token": ({"loss": "sigmoid_norm", "beta": 2.0}, {"beta": 2.0, "loss_type": ["sigmoid_norm"]}),
    "dpo + sft": (
        {"loss": "sigmoid", "beta": 0.1, "rpo_alpha": 0.5},
        {"beta": 0.1, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "ipo": ({"loss": "ipo", "beta": 0.5}, {"beta": 0.5, "loss_type": ["ipo"]}),
    "orpo": ({"loss": "orpo", "beta": 0.2}, {"beta": 0.2}),
}


def differences(own: Records, trl: Records) -> dict[str, float]:
    """For each figure that both have, the largest difference over the steps, relative to its largest value."""
    assert len(own) == len(trl)
    result: dict[str, float] = {}
    for name in sorted({name for one in own for name in one} & {name for one in trl for name in one}):
        if name in INCOMPARABLE:
            continue
        # At the first step the policy is its reference, and rounding decides which of two equal rewards is higher.
        first = 1 if name == "rewards/accuracies" else 0
        both = list(zip(own, trl, strict=True))[first:]
        pairs = [(a[name], b[name]) for a, b in both if name in a and name in b]
        largest = max(abs(b) for _, b in pairs)
        result[name] = max(abs(a - b) for a, b in pairs) / max(largest, 1e-12)
    return result


GROUP_RELATIVE: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "scale_rewards": "batch"},
}


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 8.0},
    "rslora": {"r": 4, "lora_alpha": 8.0, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"r": 4, "lora_alpha": 8.0, "use_dora": True},
}


def cases() -> dict[str, Callable[[Path, int], tuple[Records, Records]]]:
    """What the installed TRL can be compared with."""
    found: dict[str, Callable[[Path, int], tuple[Records, Records]]] = {}
    for name, changes in PREFERENCES.items():
        found[name] = lambda folder, steps, changes=changes: preference(folder, steps, *changes)
    for name, lora in {"sft": {}, **ADAPTERS}.items():
        found[name] = lambda folder, steps, lora=lora: sft(folder, steps, lora)
    for name, settings in GROUP_RELATIVE.items():
        found[name] = lambda folder, steps, settings=settings: grpo(folder, steps, settings)
    if importlib.util.find_spec("trl.experimental.ppo") is not None:
        found["ppo"] = partial(ppo, value_model="head")
        found["ppo, value model"] = partial(ppo, value_model="reward")
    return {**found, "kto": kto, "reward": reward}


def main() -> int:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=list(known), default=list(known))
    options = parser.parse_args()
    excess: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            own, trl = known[name](Path(scratch) / name, options.steps)
            found = differences(own, trl)
            excess += [f"{name}: {one}" for one in found if not found[one] <= BOUNDS.get(one, OTHER_BOUND)]
            shown = "loss" if "loss" in trl[0] else "loss/policy_avg"
            print(f"{name}: loss {trl[0][shown]:.4f} -> {trl[-1][shown]:.4f}")
            for figure, value in found.items():
                print(f"    {figure:22} {value:.1e}")
    print("all within their bounds" if not excess else f"above their bounds: {', '.join(excess)}")
    return int(bool(excess))


if __name__ == "__main__":
    sys.exit(main())
