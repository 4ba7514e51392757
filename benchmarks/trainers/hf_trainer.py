"""The job on Hugging Face `Trainer`: SDPA, fused AdamW, no logging, no saving, no evaluation."""

from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainingArguments

from trainers.hf_model import Rows, collate, first_loss, load_model
from trainers.task import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, StepClock, Task, Trained


class Ticker(TrainerCallback):
    """Tells the clock when an update is done."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.clock.tick()


def run(task: Task, out: Path, *, compiled: bool = False) -> Trained:
    model = load_model(task)
    loss = first_loss(model, task)
    clock = StepClock(task)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=task.num_steps,
        per_device_train_batch_size=task.batch_rows,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP_NORM,
        bf16=task.compute == "bf16",
        torch_compile=compiled,
        use_cpu=task.device == "cpu",
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        dataloader_pin_memory=task.device == "cuda",
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(task), data_collator=collate, callbacks=[Ticker(clock)])
    trainer.train()
    model.save_pretrained(out)  # type: ignore[operator]
    return Trained(clock=clock, first_loss=loss, weights=out)
