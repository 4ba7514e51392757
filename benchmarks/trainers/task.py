"""The job that every trainer gets, and what it reports.

A job is a folder: `model/` (Hugging Face layout, the same initial weights for all), `shards/` and `heldout/` (packed
token rows), `batches.safetensors` (the very batches that our loader gives, in order, for the trainers that do not read
our shards) and `task.json`.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

LEARNING_RATE = 1e-3
"""Constant: schedules differ by a step between libraries, and equal losses are the check that the work was equal."""
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train: `num_steps` updates on `batch_rows` rows of `seq_len` tokens, the first `warmup_steps` untimed."""

    folder: Path
    compute: Literal["fp32", "bf16"]
    num_steps: int
    warmup_steps: int
    batch_rows: int
    seq_len: int
    threads: int
    device: str

    def save(self) -> None:
        content = {**asdict(self), "folder": str(self.folder)}
        (self.folder / "task.json").write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        content = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        return cls(**{**content, "folder": folder})

    @property
    def batch_tokens(self) -> int:
        return self.batch_rows * self.seq_len

    def batches(self) -> dict[str, Tensor]:
        """`input_ids`, `shift_labels` and `position_ids`, each [steps, rows, tokens] int64."""
        return load_file(self.folder / "batches.safetensors")


def decay_groups(model: nn.Module) -> list[dict]:
    """AdamW parameter groups: weight decay on matrices only."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


@dataclass
class StepClock:
    """Notes when each step ended, in wall time and in this process's processor time (all threads together).

    On a GPU it waits for the queue only at the two ends of the timed part.
    """

    task: Task
    ends: list[float] = field(default_factory=list)
    cpu_ends: list[float] = field(default_factory=list)

    def tick(self) -> None:
        if self.task.device == "cuda" and len(self.ends) + 1 in (self.task.warmup_steps, self.task.num_steps):
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())

    @property
    def tokens_per_s(self) -> float:
        """Throughput over the timed steps, from the end of the last warm-up step to the end of the last step."""
        return self._rate(self.ends)

    @property
    def tokens_per_cpu_s(self) -> float:
        """The same per second of processor time: what is left of a comparison on a machine that others use too."""
        return self._rate(self.cpu_ends)

    def _rate(self, ends: list[float]) -> float:
        assert len(ends) == self.task.num_steps, f"{len(ends)} steps of {self.task.num_steps} were clocked"
        timed = self.task.num_steps - self.task.warmup_steps
        return timed * self.task.batch_tokens / (ends[-1] - ends[self.task.warmup_steps - 1])


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a trainer hands back: the loss on the first batch before training, and where the final weights lie."""

    clock: StepClock
    first_loss: float
    weights: Path
