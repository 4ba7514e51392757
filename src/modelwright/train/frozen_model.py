"""Models beside the one in training: a `FrozenModel`, which runs under its own layout as teacher or reference,
and a given model whose losses on each packed row are measured once and stored, for a curriculum by loss.
"""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modelwright.core.config import ConfigError, derive_seed
from modelwright.data.rows.batch import IGNORED
from modelwright.data.rows.loader import PackedRows
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh, single
from modelwright.parallel.sharded_weights import is_deferred
from modelwright.train.objective import Batch, forward
from modelwright.train.parallelize import parallelize
from modelwright.train.precision.policy import PrecisionConfig


class FrozenModel:
    """A copy of a model that is never trained: the teacher of a distillation, the reference of DPO and PPO.

    Its layout is independent of that of the model in training. sharded: its weights are sharded over all ranks of
    `world` (as in ZeRO-3) and each layer is gathered when it is needed; then all ranks call together, each with its own
    rows, equally many. Otherwise every rank has a whole copy. dtype: of its weights, None to keep theirs. Weights that
    are still on disk (`deferred_model`) are read here, by each rank its own part. It is not in checkpoints: a resumed
    run must be given the same model again.
    """

    def __init__(
        self, model: Decoder, world: World, *, sharded: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        parallel = ParallelConfig(zero_stage=3 if sharded else 0)
        model = copy.deepcopy(model)  # the reference is often the model that is going to be trained
        if not is_deferred(model):
            model.to(world.device)
        model.to(dtype).requires_grad_(False).eval()
        self.device = world.device
        self.executor = parallelize(
            model,
            mesh=build_mesh(world if sharded else single(world.device), parallel),
            parallel=parallel,
            activations=lambda part: part,
            compile_blocks=False,
            precision=PrecisionConfig(policy="fp32"),
        )

    def hidden(self, batch: Batch, *, num_parts: int = 1) -> Tensor:
        """Hidden states [B, T, D] after the last norm. num_parts: number of chunks in which the rows are processed."""
        return self.outputs(batch, num_parts, lambda hidden_BTD, part: hidden_BTD)

    def logits(self, batch: Batch, *, num_parts: int = 1) -> Tensor:
        """Logits of every token, [B, T, V]."""
        return self.outputs(batch, num_parts, lambda hidden_BTD, part: self.executor.model.logits(hidden_BTD))

    def log_probs(self, batch: Batch, *, num_parts: int = 1, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
        """log p(label) of every token, [B, T] in FP32 at least; 0 where the label is ignored. Logits exist for at most
        `chunk_tokens` tokens at a time.
        """
        score = partial(self.executor.model.token_log_probs, chunk_tokens=chunk_tokens)
        return self.outputs(batch, num_parts, lambda hidden_BTD, part: score(hidden_BTD, part.labels_BT))

    def head_output(self, name: str, batch: Batch, *, num_parts: int = 1) -> Tensor:
        """Output of one of the model's `heads` for every token, [B, T, ...]."""
        head = partial(self.executor.model.head_output, name)
        return self.outputs(batch, num_parts, lambda hidden_BTD, part: head(hidden_BTD))

    @torch.no_grad()
    def outputs(self, batch: Batch, num_parts: int, output_of: Callable[[Tensor, Batch], Tensor]) -> Tensor:
        """Applies `output_of` to the hidden states of chunks of rows; returns the results of all rows, [rows, ...]."""
        result: list[Tensor] = []

        def keep(hidden_BTD: Tensor, part: Batch) -> Tensor:
            result.append(output_of(hidden_BTD, part))
            return result[-1]

        self.executor.evaluate(batch.padded(num_parts).to(self.device).split(num_parts), keep)
        return torch.cat(result)[: batch.num_rows]


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
