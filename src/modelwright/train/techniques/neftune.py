"""NEFTune: uniform noise on the embeddings of training batches (Jain et al. 2023, "NEFTune: Noisy Embeddings Improve
Instruction Finetuning", https://arxiv.org/abs/2310.05914, algorithm 1).

The noise of a row follows from the seed, the step and the row's own tokens, so it is the same on any number of ranks
and in microbatches of any size. Evaluation, scoring and generation record no gradients and see none of it.

Legend: B rows, T tokens of a row, S tokens of a row on this rank, D model width.
"""

# PyTorch leaves the types of tolist open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from dataclasses import dataclass

import torch
from torch import Tensor

from modelwright.core.config import derive_seed
from modelwright.ops.rope_norm_swiglu import document_lengths
from modelwright.parallel.mesh import World
from modelwright.train.objective import Batch
from modelwright.train.technique import Runtime, Technique


def neftune(alpha: float, run: Runtime) -> Technique | None:
    """Returns None if no noise is configured."""
    if not alpha:
        return None
    noise = EmbeddingNoise(alpha=alpha, seed=run.seed, tensor=run.mesh.tensor)
    hooks = run.model.embedding_hooks
    hooks.append(noise)
    run.on_exit.callback(hooks.remove, noise)

    def on_batch(step: int, batch: Batch) -> Batch:
        noise.step = step
        return batch

    return Technique(name="neftune", on_batch=on_batch, needs=frozenset())


@dataclass(kw_only=True, eq=False)
class EmbeddingNoise:
    """The `EmbeddingHook` that adds the noise. tensor: the ranks that share a row's tokens in sequence parallelism."""

    alpha: float
    seed: int
    tensor: World
    step: int = 0

    def __call__(self, hidden_BSD: Tensor, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Adds uniform noise of at most alpha / sqrt(L D), where L is the length of the token's document."""
        num_tokens, width = hidden_BSD.shape[1:]
        seeds = [derive_seed(self.seed, "neftune", self.step, key) for key in row_keys(tokens_BT).tolist()]
        noise_BTD = torch.stack([uniform(seed, tokens_BT.shape[1], width, hidden_BSD.device) for seed in seeds])
        scale_BT = self.alpha * (document_lengths(positions_BT) * width).to(noise_BTD.dtype).rsqrt()
        noise_BTD *= scale_BT[..., None]
        # Whole rows of noise are drawn, and the rank takes its tokens: parts drawn by each rank would depend on their
        # number.
        first = self.tensor.rank * num_tokens if num_tokens < tokens_BT.shape[1] else 0
        return hidden_BSD + noise_BTD[:, first : first + num_tokens].to(hidden_BSD.dtype)


def row_keys(tokens_BT: Tensor) -> Tensor:
    """A hash of the tokens of each row, int64 [B]: a linear one with fixed random weights, modulo 2^64."""
    draw = torch.Generator().manual_seed(0)
    weights_T = torch.randint(-(2**63), 2**63 - 1, (tokens_BT.shape[1],), generator=draw)
    # + 1, because token 0 would not count; integers wrap around without error.
    return ((tokens_BT + 1) * weights_T.to(tokens_BT.device)).sum(dim=1)


def uniform(seed: int, num_tokens: int, width: int, device: torch.device) -> Tensor:
    """Uniform values in [-1, 1), FP32 [T, D]."""
    draw = torch.Generator(device).manual_seed(seed)
    return torch.rand(num_tokens, width, generator=draw, device=device).mul_(2.0).sub_(1.0)
