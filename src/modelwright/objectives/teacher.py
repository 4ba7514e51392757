"""Teacher of a distillation: a frozen model, its layers' activations, and its output projection.

Legend: B rows, T tokens, E width of the teacher, V vocabulary, K likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import HeadInputs, LayerTaps
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.ops.cross_entropy import CHUNK_TOKENS, soft_cap_logits
from modelwright.ops.distillation_loss import DivergenceKind, TeacherHead
from modelwright.parallel.mesh import World
from modelwright.train.frozen_model import FrozenModel

TOKENS_AT_ONCE = 4096
"""Number of tokens that the teacher evaluates at a time, in whole rows."""


@dataclass(frozen=True, kw_only=True)
class TeacherOutput:
    """Activations of a teacher for a batch of rows."""

    hidden_BTE: Tensor
    """Hidden states after the last norm."""
    outputs: Sequence[Tensor]
    """Outputs of the requested layers, [B, T, E] each."""
    heads: Sequence[HeadInputs]
    """Queries, keys and values of the requested layers."""


@dataclass(frozen=True, kw_only=True)
class TeacherModel:
    """A frozen copy of a model, whole on each rank or sharded over all of them (`FrozenModel`)."""

    frozen: FrozenModel
    config: ModelConfig
    head_VE: Tensor
    """Output projection, whole on every rank."""

    @classmethod
    def of(cls, model: Decoder, world: World, *, sharded: bool = False) -> "TeacherModel":
        """Copies `model`. sharded: all ranks make every call together, with equally many own rows."""
        frozen = FrozenModel(model, world, sharded=sharded)
        # Logits are computed outside of the model, where a sharded head is not whole
        head_VE = model.head_weight.detach().to(world.device).clone() if sharded else frozen.executor.model.head_weight
        return cls(frozen=frozen, config=model.config, head_VE=head_VE)

    def output(self, batch: TokenBatch, *, outputs: Sequence[int] = (), heads: Sequence[int] = ()) -> TeacherOutput:
        """Evaluates a batch. outputs, heads: layers whose outputs, and whose queries, keys and values, are returned."""
        taps = LayerTaps(self.frozen.executor.model, outputs=outputs, heads=heads)

        # The frozen model returns one tensor for each row, so all activations are concatenated and split again
        def joined(hidden_BTE: Tensor, part: TokenBatch) -> Tensor:
            inner, attended = taps.take()
            return torch.cat([hidden_BTE, *inner, *(tensor for layer in attended for tensor in layer)], dim=-1)

        # Chunks of whole rows, equally many on ranks with equally many rows, as a sharded model requires
        num_parts = min(batch.num_rows, ceil(batch.num_tokens / TOKENS_AT_ONCE))
        try:
            all_BTX = self.frozen.outputs(batch, num_parts, joined)
        finally:
            taps.remove()
        width, config = self.config.model_dim, self.config
        head_widths = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        sizes = [*[width] * (1 + len(outputs)), *head_widths * len(heads)]
        hidden_BTE, *rest = all_BTX.split(sizes, dim=-1)
        inner, flat = rest[: len(outputs)], rest[len(outputs) :]
        layers = [HeadInputs(*flat[3 * place : 3 * place + 3]) for place in range(len(heads))]
        return TeacherOutput(hidden_BTE=hidden_BTE, outputs=inner, heads=layers)

    def targets(self, hidden_BTE: Tensor, divergence: DivergenceKind) -> TeacherHead:
        """Returns the distributions of all tokens, with the divergence to minimize."""
        return TeacherHead(
            hidden_NE=hidden_BTE.flatten(0, 1),
            weight_VE=self.head_VE,
            soft_cap=self.config.logit_soft_cap,
            kind=divergence,
        )

    @torch.no_grad()
    def top_tokens(self, row: TokenBatch, temperature: float, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the K likeliest tokens of one row at a temperature: log-probabilities and numbers, [T, K] each."""
        hidden_TE = self.frozen.hidden(row)[0]
        parts: list[tuple[Tensor, Tensor]] = []
        for hidden_CE in hidden_TE.split(CHUNK_TOKENS):
            logits_CV = hidden_CE @ self.head_VE.T.to(hidden_CE.dtype)
            logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
            if self.config.logit_soft_cap:
                logits_CV = soft_cap_logits(logits_CV, self.config.logit_soft_cap)
            values_CK, tokens_CK = (logits_CV / temperature).log_softmax(dim=-1).topk(top_k, dim=-1)
            parts.append((values_CK, tokens_CK))
        values, tokens = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(tokens)
