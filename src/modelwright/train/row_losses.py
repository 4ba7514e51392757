"""Losses of a given model on each packed row, or group of rows: measured once and stored, for a curriculum by loss."""

from pathlib import Path

import numpy as np
import torch

from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.loader import PackedRows
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.parallel.mesh import World
from modelwright.train.objective import forward

ROWS_AT_ONCE = 8


def stored_row_losses(rows: PackedRows, model_folder: Path, folder: Path, world: World) -> np.ndarray:
    """The mean loss of the labels of each group of rows in nats, [groups] float32, under the model of a Hugging Face
    folder.

    The first rank measures them, unless a file in `folder`, which all ranks see, has them already. All ranks call it.
    Raises `ConfigError` if the model has another vocabulary, `ModelError` if it cannot be read.
    """
    weights = sorted(model_folder.glob("*.safetensors"))
    stamp = [f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in weights]
    key = derive_seed(0, str(model_folder.resolve()), *stamp, rows.num_rows, rows.num_tokens, rows.num_targets)
    path = folder / f"row-losses-{key:016x}.npy"
    if world.is_first and not path.exists():
        model = load_model(model_folder)
        if model.config.vocab_size < rows.vocab_size:
            raise ConfigError(
                f"batching.curriculum.by: {model_folder} has a vocabulary of {model.config.vocab_size}, the rows "
                f"one of {rows.vocab_size}; choose a model with the tokenizer of this run"
            )
        losses = row_losses(model.to(world.device), rows, world.device)
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:  # an open file, because `np.save` would add .npy to a name
            np.save(file, losses, allow_pickle=False)
        partial.rename(path)
    world.barrier()
    return np.load(path, allow_pickle=False)


@torch.no_grad()
def row_losses(model: Decoder, rows: PackedRows, device: torch.device) -> np.ndarray:
    """The mean loss of the labels of each group, [groups] float32; 0 for one without labels."""
    model.eval()
    losses = np.empty(rows.num_groups, dtype=np.float32)
    # By length, so that the rows of a batch need little padding; stable, so that every run has the same batches.
    order, lengths = np.argsort(rows.group_lengths(), kind="stable"), rows.group_lengths()
    for first in range(0, rows.num_groups, ROWS_AT_ONCE):
        chosen = order[first : first + ROWS_AT_ONCE]
        batch = rows.gather(chosen, int(lengths[chosen].max())).to(device)
        hidden_BTD = forward(model, batch)
        log_probs_BT = model.token_log_probs(hidden_BTD, batch.labels_BT)
        sums_G = log_probs_BT.reshape(len(chosen), -1).sum(dim=1)
        counts_G = (batch.labels_BT != IGNORED).reshape(len(chosen), -1).sum(dim=1)
        losses[chosen] = (-sums_G / counts_G.clamp(min=1)).cpu().numpy()
    return losses
