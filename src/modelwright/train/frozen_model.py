"""`FrozenModel`: a teacher or a reference model that runs alongside training, under its own layout."""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from modelwright.model.decoder import Decoder
from modelwright.ops.cross_entropy import CHUNK_TOKENS
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.full_state import is_deferred
from modelwright.parallel.mesh import World, build_mesh, single
from modelwright.train.objective import Batch
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
