"""The job on Modelwright: its loader, its objective, THE loop, with their defaults."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from modelwright.core.artifacts import StageDir
from modelwright.core.progress import SilentProgress
from modelwright.data.rows.loader import PackedLoader, PackedRows
from modelwright.model.hf import load_model, save_model
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import single
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright.train.objective import forward
from modelwright.train.precision.policy import PrecisionConfig
from modelwright.train.technique import StepInfo, observer
from modelwright.train.techniques.learning_rate import ScheduleConfig
from trainers.task import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, StepClock, Task, Trained

SEED = 0


class Ticker:
    """Tells the clock when an update is done."""

    every = 1

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def observe(self, info: StepInfo) -> None:
        self.clock.tick()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def loader(task: Task) -> PackedLoader:
    """The job's rows in our loader's order, which is the order that all trainers take them in."""
    return PackedLoader(PackedRows(task.folder / "shards"), batch_rows=task.batch_rows, seed=SEED)


def write_batches(task: Task) -> None:
    """Write the job's batches, in our loader's order, for the trainers that do not read our shards."""
    batches = [loader(task).batch(step) for step in range(task.num_steps)]
    tensors = {
        "input_ids": torch.stack([batch.input_ids_BT for batch in batches]),
        "shift_labels": torch.stack([batch.labels_BT for batch in batches]),
        "position_ids": torch.stack([batch.positions_BT for batch in batches]),
    }
    save_file(tensors, task.folder / "batches.safetensors")


def run(task: Task, out: Path) -> Trained:
    model = load_model(task.folder / "model").to(task.device)
    objective = NextToken(loader(task))
    batch = objective.source.batch(0).to(task.device)
    with torch.no_grad():
        first_loss = float(objective.losses(forward(model, batch), batch, model).losses["loss"]) / batch.num_targets
    clock = StepClock(task)
    config = TrainConfig(
        num_steps=task.num_steps,
        batch_tokens=task.batch_tokens,
        learning_rate=LEARNING_RATE,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP_NORM,
        schedule=ScheduleConfig(kind="constant", warmup_fraction=0.0),
        precision=PrecisionConfig(policy="bf16_mixed" if task.compute == "bf16" else "fp32"),
    )
    train(
        TrainJob(
            model=model,
            objective=objective,
            config=config,
            num_steps=task.num_steps,
            stage=StageDir(out),
            seed=SEED,
            name="benchmark",
            input_digest="benchmark",
            techniques=[observer("ticker", Ticker(clock).observe)],
        ),
        single(task.device),
        SilentProgress(),
    )
    save_model(model, out / "model")
    return Trained(clock=clock, first_loss=first_loss, weights=out / "model")
