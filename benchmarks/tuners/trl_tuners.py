"""The job on TRL, and on TRL with PEFT: SDPA, fused AdamW, no gradient checkpointing, no logging, no saving."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports] - comes with trl
from peft import LoraConfig  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import (  # pyright: ignore[reportMissingImports]
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    SFTConfig,
    SFTTrainer,
)

from tuners.task import (
    BETAS,
    CLIP_NORM,
    EOS,
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    LORA_TARGETS,
    PAD,
    SEED,
    VOCABULARY,
    Clock,
    Task,
    even_share,
    mean_len,
    pairs,
    prompts,
    samples_of_update,
    sequences,
    text,
)


class Ticker(TrainerCallback):
    """Tells the clock when an update is done."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.tick()


class Counting:
    """A collator that notes how many tokens of each batch are no padding."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.tokens: list[float] = []

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if isinstance(batch, Mapping) and "input_ids" in batch:
            mask = batch.get("attention_mask")
            self.tokens.append(float(batch["input_ids"].numel() if mask is None else mask.sum()))
        return batch


def run(task: Task, name: str, out: Path) -> dict[str, Any]:
    clock = Clock(task)
    trainer = {"sft": sft, "lora": sft, "dpo": dpo, "grpo": grpo}[task.case](task, name, out, [Ticker(clock)])
    counting = trainer.data_collator = Counting(trainer.data_collator)
    losses: list[torch.Tensor] = []
    compute_loss = trainer.compute_loss

    def noted(*args: Any, **more: Any) -> Any:
        loss = compute_loss(*args, **more)
        losses.append((loss[0] if isinstance(loss, tuple) else loss).detach())
        return loss

    trainer.compute_loss = noted
    trainer.train()
    if task.case in ("sft", "lora"):
        samples = [one / mean_len(task) for one in counting.tokens]
    else:
        samples = [float(task.batch)] * task.num_updates
    tokens = counting.tokens
    if task.case == "grpo":  # whose batches are made after generation
        tokens = [float(task.batch * (task.prompt_len + task.completion_len))] * task.num_updates
    return {**clock.rates(samples, tokens), "first_loss": float(losses[0])}


def settings(task: Task, out: Path) -> dict[str, Any]:
    """What all of TRL's trainings share."""
    return {
        "output_dir": str(out), "max_steps": task.num_updates, "per_device_train_batch_size": task.batch,
        "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0, "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1], "max_grad_norm": CLIP_NORM, "optim": "adamw_torch_fused", "seed": SEED,
        "bf16": task.compute == "bf16", "gradient_checkpointing": False, "use_cpu": True,
        "train_sampling_strategy": "sequential", "logging_strategy": "no", "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "dataloader_num_workers": 0, "dataloader_pin_memory": False,
    }  # fmt: skip


def load(task: Task) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(task.folder / "model", attn_implementation="sdpa", dtype=torch.float32)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each token."""
    words = {"<pad>": PAD, "</s>": EOS, **{f"w{token}": token for token in range(2, VOCABULARY)}}
    library = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="</s>")


def sft(task: Task, name: str, out: Path, callbacks: Sequence[TrainerCallback]) -> Any:
    """Rows of whole texts (`packing`); texts one after the other without padding (`padding_free`); or a row for each
    text. An update has as many tokens in all of them.
    """
    each = {"per_device_train_batch_size": samples_of_update(task), "max_length": None}
    changes = {
        "TRL, packed": {"packing": True, "max_length": task.seq_len},
        "TRL, padding-free": {**each, "padding_free": True},
        "TRL, padded": each,
    }[name]
    adapters = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=list(LORA_TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return SFTTrainer(
        model=load(task),
        args=SFTConfig(**{**settings(task, out), **changes}),
        train_dataset=Dataset.from_dict({"input_ids": sequences(task)}),
        processing_class=tokenizer(),
        peft_config=adapters if task.case == "lora" else None,
        callbacks=list(callbacks),
    )


def dpo(task: Task, name: str, out: Path, callbacks: Sequence[TrainerCallback]) -> Any:
    rows = [{"prompt": text(a), "chosen": text(b), "rejected": text(c)} for a, b, c in pairs(task)]
    return DPOTrainer(
        model=load(task),
        args=DPOConfig(beta=0.1, max_length=None, **settings(task, out)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [even_share(ids) for ids in completion_ids]


def grpo(task: Task, name: str, out: Path, callbacks: Sequence[TrainerCallback]) -> Any:
    arguments = GRPOConfig(
        num_generations=task.num_generations,
        num_iterations=1,
        steps_per_generation=1,
        max_completion_length=task.completion_len,
        beta=0.0,
        shuffle_dataset=False,
        **settings(task, out),
    )
    return GRPOTrainer(
        model=load(task),
        reward_funcs=even,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": text(ids)} for ids in prompts(task)]),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )
