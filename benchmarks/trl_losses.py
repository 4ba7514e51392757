"""Losses and metrics of the alignment objectives, step by step, beside those of TRL on the same model, data and seed.

    python benchmarks/trl_losses.py --steps 30

needs `pip install trl` (1.16 was used). A Llama of 2 layers and width 64 in FP32, AdamW, a constant rate, no clipping.
TRL pads one answer to a row; ours are packed, several to a row. Prints the largest difference of each figure over all
steps, relative to its largest value, and ends with an error if one is above its bound.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports] - comes with trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # pyright: ignore[reportMissingImports]

from modelwright.core.config import parse
from modelwright.core.records import read_records
from modelwright.core.rundir import StageDir
from modelwright.data.batch import TokenBatch
from modelwright.data.loader import PackedRows
from modelwright.data.pack import PackConfig, TokenSequence, pack
from modelwright.data.preferences import PromptedAnswer
from modelwright.model.hf import load_model, load_sequence_classifier
from modelwright.objectives.kto import Kto, KtoConfig
from modelwright.objectives.preference import Preference, PreferenceConfig
from modelwright.objectives.reward_model import HEAD
from modelwright.objectives.reward_modeling import RewardModelConfig, RewardModeling
from modelwright.parallel.mesh import single
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.frozen_model import FrozenModel
from modelwright.train.job import TrainJob
from modelwright.train.objective import Objective

VOCABULARY, SEQ_LEN, BATCH, RATE, SEED = 64, 48, 8, 1e-3, 0
PAD, EOS = 0, 1
BOUNDS = {"loss": 1e-4}
OTHER_BOUND = 1e-3
"""Largest relative differences. Both sides compute in FP32 and add up in another order; margins are small differences
of log-probabilities of about 50 nats."""
SHARED = {
    "learning_rate": RATE,
    "betas": [0.9, 0.999],
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "schedule": {"kind": "constant", "warmup_fraction": 0.0},
    "precision": {"policy": "fp32"},
    "eval_every_steps": 0,
    "checkpoint_every_minutes": 0.0,
    "keep_best": False,
    "batch_tokens": 2 * BATCH * SEQ_LEN,
}
Records = Sequence[Mapping[str, float]]


def answers(num_prompts: int, prompt_len: int) -> list[tuple[PromptedAnswer, PromptedAnswer]]:
    """Two random answers to each random prompt, each ending with the end token. prompt_len: at most."""
    dice, found = np.random.default_rng(SEED), []
    for _ in range(num_prompts):
        prompt = dice.integers(2, VOCABULARY, size=int(dice.integers(1, prompt_len + 1)))
        two = []
        for _ in range(2):
            answer = np.append(dice.integers(2, VOCABULARY, size=int(dice.integers(2, 16))), EOS)
            mask = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), len(answer)])
            two.append(PromptedAnswer(np.concatenate([prompt, answer]), mask))
        found.append((two[0], two[1]))
    return found


def margins(num_pairs: int) -> list[float]:
    return np.random.default_rng(SEED + 1).random(num_pairs).astype(np.float32).tolist()


@dataclass
class InOrder:
    """Batch k has the groups from k * BATCH on, packed for itself, as TRL's sequential sampler takes them."""

    groups: Sequence[tuple[TokenSequence, TokenSequence]]
    folder: Path
    num_batches_per_epoch: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_batches_per_epoch = len(self.groups) // BATCH
        for index in range(self.num_batches_per_epoch):
            own = self.groups[index * BATCH : (index + 1) * BATCH]
            sequences = [sequence for group in own for sequence in group]
            config = PackConfig(seq_len=SEQ_LEN)
            pack(sequences, self.folder / str(index), config, vocab_size=VOCABULARY, eos_id=EOS, group_size=2)

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        rows = PackedRows(self.folder / str(index))
        return rows.gather(np.arange(rows.num_groups))


def ours(objective: Objective, model: Any, config: TrainConfig, folder: Path) -> Records:
    """The records of our training."""
    job = TrainJob(
        model=model, objective=objective, config=config, num_steps=config.num_steps, stage=StageDir(folder), seed=SEED
    )
    train(job, single())
    return [record for record in read_records(folder / "metrics.jsonl") if "loss" in record]


def theirs(trainer: Any) -> Records:
    """The records of TRL's training, with losses that are not rounded."""
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def recorded(*args: Any, **more: Any) -> Any:
        loss = compute_loss(*args, **more)
        losses.append(float(loss.detach()))
        return loss

    trainer.compute_loss = recorded
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [{**log, "loss": loss} for log, loss in zip(logs, losses, strict=True)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each token."""
    words = {"<pad>": PAD, "</s>": EOS, **{f"w{token}": token for token in range(2, VOCABULARY)}}
    library = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="</s>")


def text(ids: np.ndarray) -> str:
    """The words of tokens, without the end token, which TRL adds."""
    return "".join(f" w{token}" for token in ids.tolist() if token != EOS)


def trl_settings(folder: Path, steps: int) -> dict[str, Any]:
    """What all of TRL's trainings share."""
    return {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": steps, "learning_rate": RATE,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0, "logging_steps": 1, "bf16": False,
        "gradient_checkpointing": False, "use_cpu": True, "train_sampling_strategy": "sequential", "seed": SEED,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "dataloader_num_workers": 0,
    }  # fmt: skip


def llama(folder: Path, kind: Any) -> Path:
    """A random model with large weights, so that rewards differ; the reference has others."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, pad_token_id=PAD, eos_token_id=EOS,
        tie_word_embeddings=False,
    )  # fmt: skip
    config.num_labels = 1
    torch.manual_seed(SEED)
    kind(config).save_pretrained(folder)
    return folder


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


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
        if name in ("step", "epoch", "learning_rate", "grad_norm", "num_tokens"):
            continue
        # At the first step the policy is its reference, and rounding decides which of two equal rewards is higher.
        first = 1 if name == "rewards/accuracies" else 0
        both = list(zip(own, trl, strict=True))[first:]
        pairs = [(a[name], b[name]) for a, b in both if name in a and name in b]
        largest = max(abs(b) for _, b in pairs)
        result[name] = max(abs(a - b) for a, b in pairs) / max(largest, 1e-12)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps: int = parser.parse_args().steps
    excess: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in (*CASES, "kto", "reward"):
            folder = Path(scratch) / name
            if name in CASES:
                own, trl = preference(folder, steps, *CASES[name])
            else:
                own, trl = {"kto": kto, "reward": reward}[name](folder, steps)
            found = differences(own, trl)
            excess += [f"{name}: {one}" for one in found if not found[one] <= BOUNDS.get(one, OTHER_BOUND)]
            print(f"{name}: loss {trl[0]['loss']:.4f} -> {trl[-1]['loss']:.4f}")
            for figure, value in found.items():
                print(f"    {figure:22} {value:.1e}")
    print("all within their bounds" if not excess else f"above their bounds: {', '.join(excess)}")
    return int(bool(excess))


if __name__ == "__main__":
    sys.exit(main())
