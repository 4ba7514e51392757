"""The job on Lightning: the same `transformers` model, fused AdamW, no logger, no checkpoints, no progress bar."""

from pathlib import Path

import lightning  # pyright: ignore[reportMissingImports] - installed by `make bench` alone
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainers.hf_model import Rows, collate, first_loss, load_model
from trainers.task import BETAS, CLIP_NORM, LEARNING_RATE, StepClock, Task, Trained, decay_groups


class Job(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module, clock: StepClock) -> None:
        super().__init__()
        self.model = model
        self.clock = clock

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(decay_groups(self.model), lr=LEARNING_RATE, betas=BETAS, fused=True)

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float, gradient_clip_algorithm: str | None
    ) -> None:
        """Clip by the norm of all gradients, as Lightning itself does in FP32.

        In mixed precision Lightning refuses to clip for a fused optimizer, since that removes an FP16 loss scale only
        after clipping. BF16 has no loss scale, so all trainers can have a fused optimizer and the same clipping.
        """
        torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def on_train_batch_end(self, *_) -> None:
        self.clock.tick()


def run(task: Task, out: Path) -> Trained:
    model = load_model(task)
    loss = first_loss(model, task)
    clock = StepClock(task)
    trainer = lightning.Trainer(
        accelerator="gpu" if task.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if task.compute == "bf16" else "32-true",
        max_steps=task.num_steps,
        gradient_clip_val=CLIP_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    rows = DataLoader(Rows(task), batch_size=task.batch_rows, shuffle=False, collate_fn=collate, num_workers=0)
    model.train()
    trainer.fit(Job(model, clock), rows)
    model.save_pretrained(out)  # type: ignore[operator]
    return Trained(clock=clock, first_loss=loss, weights=out)
