"""The model and the data as the two Hugging Face-based trainers see them.

Packed rows reach `transformers` as position ids that restart in each document and no attention mask: with SDPA it
then builds the block-causal mask itself, so that documents do not see one another, exactly as ours.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from trainers.task import Task


class Rows(Dataset):
    """The job's rows in the order in which the steps take them."""

    def __init__(self, task: Task) -> None:
        self.tensors = {name: tensor.flatten(0, 1) for name, tensor in task.batches().items()}

    def __len__(self) -> int:
        return len(self.tensors["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {name: tensor[index] for name, tensor in self.tensors.items()}
        return {**row, "labels": row["shift_labels"]}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows of equal length."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def load_model(task: Task) -> nn.Module:
    """The initial weights as a `transformers` model with SDPA and without a KV cache."""
    model = AutoModelForCausalLM.from_pretrained(task.folder / "model", attn_implementation="sdpa", dtype=torch.float32)
    model.config.use_cache = False
    model.to(torch.device(task.device))  # type: ignore[arg-type]
    return model


def first_loss(model: nn.Module, task: Task) -> float:
    """Mean loss of the first batch, in FP32, before any update."""
    batch = collate([Rows(task)[i] for i in range(task.batch_rows)])
    with torch.no_grad():
        return model(**{name: tensor.to(task.device) for name, tensor in batch.items()}).loss.item()
