"""The tiny models and data of `trl_losses.py`, and what either side recorded of a training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from modelwright.core.artifacts import StageDir
from modelwright.core.records import read_records
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.examples import PromptedAnswer
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import PackConfig, TokenSequence, pack
from modelwright.parallel.mesh import single
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.objective import Objective

VOCABULARY, SEQ_LEN, BATCH, RATE, SEED = 64, 48, 8, 1e-3, 0
PAD, EOS = 0, 1
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

    groups: Sequence[tuple[TokenSequence, ...]]
    folder: Path
    num_batches_per_epoch: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_batches_per_epoch = len(self.groups) // BATCH
        for index in range(self.num_batches_per_epoch):
            own = self.groups[index * BATCH : (index + 1) * BATCH]
            sequences = [sequence for group in own for sequence in group]
            config = PackConfig(seq_len=SEQ_LEN)
            place, size = self.folder / str(index), len(own[0])
            pack(sequences, place, config, vocab_size=VOCABULARY, eos_id=EOS, group_size=size)

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


def tokenizer(pad_id: int = PAD) -> PreTrainedTokenizerFast:
    """One word for each token."""
    words = {"<pad>": pad_id, "</s>": EOS, **{f"w{token}": token for token in range(2, VOCABULARY)}}
    words |= {} if pad_id == PAD else {"w0": PAD}
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


def llama(folder: Path, kind: Any, seed: int = SEED) -> Path:
    """A random model with large weights, so that rewards differ; the reference has others."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, pad_token_id=PAD, eos_token_id=EOS,
        tie_word_embeddings=False,
    )  # fmt: skip
    config.num_labels = 1
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    return folder
