"""One process of a training that may be killed, on Modelwright or on Hugging Face `Trainer`: see `cost_of_a_kill`.

    python -m modelwright_claims.kill_worker TOOL TASK.json OUT     train in the folder OUT, or go on with what is there
    python -m modelwright_claims.kill_worker defaults               the version and the default `save_steps` of Trainer

Each line of its output is JSON: after every update `[step, monotonic seconds]`. Both tools take the same initial
weights, the same packed rows in the same order and the same optimizer, and resume as their documentation says.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

OURS, TRAINER = "Modelwright", "Hugging Face Trainer"
MODEL, ROWS, BATCHES, FINAL = "model", "rows", "batches.safetensors", "final"
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 1e-3, (0.9, 0.95), 0.1, 1.0
"""The rate is constant, because schedules of libraries differ by a step."""
NOT_NEEDED = ("torchao", "datasets", "peft", "scipy", "sklearn", "pandas")
"""`transformers` imports these where they are installed. This training needs none, and starts sooner without them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The training. folder: with the initial weights (`MODEL`), our rows (`ROWS`) and the batches that our loader
    makes of them (`BATCHES`, tensors [steps * rows, tokens]); save_every: steps between checkpoints, 0 for none.
    """

    folder: str
    num_steps: int
    batch_rows: int
    seq_len: int
    threads: int
    save_every: int = 0


def train_ours(task: Task, out: Path, report: Callable[[int], None]) -> None:
    from modelwright.core.artifacts import StageDir
    from modelwright.data.rows.loader import PackedLoader, PackedRows
    from modelwright.model.hf import load_model, save_model
    from modelwright.objectives.next_token import NextToken
    from modelwright.train.build import train
    from modelwright.train.config import TrainConfig
    from modelwright.train.job import TrainJob
    from modelwright.train.precision.policy import PrecisionConfig
    from modelwright.train.technique import observer
    from modelwright.train.techniques.learning_rate import ScheduleConfig

    model, rows = load_model(Path(task.folder) / MODEL), PackedRows(Path(task.folder) / ROWS)
    config = TrainConfig(
        num_steps=task.num_steps, batch_tokens=task.batch_rows * task.seq_len, learning_rate=LEARNING_RATE,
        betas=BETAS, weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP_NORM,
        schedule=ScheduleConfig(kind="constant", warmup_fraction=0.0), precision=PrecisionConfig(policy="fp32"),
        checkpoint_every_steps=task.save_every, checkpoint_every_minutes=0.0,
    )  # fmt: skip
    train(
        TrainJob(
            model=model, objective=NextToken(PackedLoader(rows, batch_rows=task.batch_rows, seed=0)), config=config,
            num_steps=task.num_steps, stage=StageDir(out), input_digest="killed", is_resumable=task.save_every > 0,
            techniques=[observer("report", lambda info: report(info.step))],
        )
    )  # fmt: skip
    save_model(model, out / FINAL)


def train_peer(task: Task, out: Path, report: Callable[[int], None]) -> None:
    sys.modules.update(dict.fromkeys(NOT_NEEDED))  # type: ignore[arg-type]  # None: as if it were not installed
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Reporter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report(state.global_step)

    tensors = load_file(Path(task.folder) / BATCHES)
    rows: Any = [{name: tensor[row] for name, tensor in tensors.items()} for row in range(len(tensors["input_ids"]))]
    # With SDPA, positions that restart with every document and no mask keep documents apart, as in our rows.
    model: Any = AutoModelForCausalLM.from_pretrained(
        Path(task.folder) / MODEL, attn_implementation="sdpa", dtype=torch.float32
    )
    model.config.use_cache = False
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=task.num_steps, per_device_train_batch_size=task.batch_rows,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", optim="adamw_torch_fused", adam_beta1=BETAS[0],
        adam_beta2=BETAS[1], weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP_NORM, use_cpu=True,
        train_sampling_strategy="sequential", dataloader_num_workers=0, dataloader_pin_memory=False,
        remove_unused_columns=False, logging_strategy="no", report_to="none", disable_tqdm=True,
        save_strategy="steps" if task.save_every else "no", save_steps=task.save_every or TrainingArguments.save_steps,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Reporter()])
    # `resume_from_checkpoint=True` is the same, except that it is an error where there is no checkpoint yet.
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)))
    model.save_pretrained(out / FINAL)


def main() -> None:
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what the tools print themselves goes to the errors
    if sys.argv[1:] == ["defaults"]:
        import transformers

        defaults = {"version": transformers.__version__, "save_steps": transformers.TrainingArguments.save_steps}
        print(json.dumps(defaults), file=events)
        return

    task = Task(**json.loads(sys.argv[2]))
    torch.set_num_threads(task.threads)
    train = {OURS: train_ours, TRAINER: train_peer}[sys.argv[1]]
    train(task, Path(sys.argv[3]), lambda step: print(json.dumps([step, time.monotonic()]), file=events))


if __name__ == "__main__":
    main()
