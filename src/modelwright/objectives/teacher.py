"""Teacher of a distillation: a frozen model with its layers' activations and its output projection, a cache on disk of
its largest probabilities, and the comparison of its attention with the student's.

Legend: B rows, T tokens, C student's and E teacher's channels (of all heads in attention), V vocabulary, K likeliest
tokens.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, gcd
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from modelwright.core.artifacts import StorageError, writing
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import HeadInputs, LayerTaps
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.ops.attention_divergence import relation_loss
from modelwright.ops.cross_entropy import CHUNK_TOKENS, soft_cap_logits
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


LOG_PROBS, TOKENS = "top_log_probs_BTK", "top_tokens_BTK"
"""Extras of a batch with the stored probabilities."""


@dataclass(kw_only=True)
class TeacherCache:
    """Adds the teacher's K likeliest tokens at a temperature to batches, and writes those of new rows to `folder`.

    Each rank writes its own shards and finds those of all ranks when it starts. The folder belongs to one teacher, one
    temperature and one K; the rows of a damaged shard are computed again.
    """

    teacher: TeacherModel
    folder: Path
    temperature: float
    top_k: int
    rank: int = 0
    places: dict[str, tuple[Path, int]] = field(default_factory=dict[str, tuple[Path, int]], init=False)
    """Shard and place of each row, by digest."""

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    digests = (file.metadata() or {}).get("rows", "").split()
                    shape = file.get_slice(TOKENS).get_shape()
            except (SafetensorError, OSError):
                continue
            if shape[0] == len(digests) and shape[2] == self.top_k:
                self.places |= {digest: (path, place) for place, digest in enumerate(digests)}

    def extras(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        """Returns the probabilities of a batch's rows, [B, T, K] each, on the batch's device."""
        # By all inputs of a teacher; labels do not count
        inputs = (batch.input_ids_BT, batch.positions_BT, batch.segments_BT.long())
        digests: list[str] = []
        for row in range(batch.num_rows):
            hasher = hashlib.blake2b(digest_size=16)
            for values in inputs:
                hasher.update(values[row].cpu().contiguous().numpy().tobytes())
            digests.append(hasher.hexdigest())
        found, new = dict[str, tuple[Tensor, Tensor]](), dict[str, tuple[Tensor, Tensor]]()
        for digest in digests:
            if digest in self.places:
                path, place = self.places[digest]
                with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
                    found[digest] = file.get_slice(LOG_PROBS)[place], file.get_slice(TOKENS)[place]
        for row, digest in enumerate(digests):
            if digest not in found:
                alone = TokenBatch(
                    input_ids_BT=batch.input_ids_BT[row : row + 1],
                    labels_BT=batch.labels_BT[row : row + 1],
                    positions_BT=batch.positions_BT[row : row + 1],
                    segments_BT=batch.segments_BT[row : row + 1],
                )
                log_probs_TK, tokens_TK = self.teacher.top_tokens(alone, self.temperature, self.top_k)
                new[digest] = log_probs_TK.float().cpu(), tokens_TK.int().cpu()
        if new:
            # A shard, named by rank and rows: ranks that share the folder never write the same file
            name = hashlib.sha256(" ".join(new).encode()).hexdigest()[:16]
            path = self.folder / f"{self.rank}-{name}.safetensors"
            log_probs_BTK, tokens_BTK = (torch.stack(parts) for parts in zip(*new.values(), strict=True))
            temporary = path.with_suffix(".tmp")
            with writing(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    tensors = {LOG_PROBS: log_probs_BTK, TOKENS: tokens_BTK}
                    save_file(tensors, temporary, metadata={"rows": " ".join(new)})
                except SafetensorError as error:
                    raise StorageError(f"{path}: cannot be written ({error}); free some space and run again") from error
                os.replace(temporary, path)
            self.places |= {digest: (path, place) for place, digest in enumerate(new)}
        rows = found | new
        log_probs_BTK, tokens_BTK = (torch.stack(parts) for parts in zip(*map(rows.__getitem__, digests), strict=True))
        device = batch.input_ids_BT.device
        return {LOG_PROBS: log_probs_BTK.to(device), TOKENS: tokens_BTK.to(device, torch.int64)}


@dataclass(frozen=True)
class AttentionRelations:
    """Compares queries with queries, keys with keys, values with values, of the last layers. MiniLMv2 leaves the other
    layers of the student free.
    """

    student: ModelConfig
    teacher: ModelConfig

    def extras(self, heads: HeadInputs) -> dict[str, Tensor]:
        """Returns the tensors of the teacher's last layer that a batch carries as extras, by name."""
        return {f"relation_{kind}_BTE": channels for kind, channels in enumerate(heads)}

    def loss(self, own: HeadInputs, batch: TokenBatch) -> Tensor:
        """Sum over tokens of the mean divergence over relation heads and the three kinds. own: inputs of the student's
        last layer, with gradients.
        """
        num_heads = num_relation_heads(self.student, self.teacher)
        losses = [
            relation_loss(channels, batch.extras[f"relation_{kind}_BTE"], batch.segments_BT, num_heads=num_heads)
            for kind, channels in enumerate(own)
        ]
        return torch.stack(losses).sum() / (num_heads * len(losses))


def num_relation_heads(student: ModelConfig, teacher: ModelConfig) -> int:
    """Largest number that divides all widths of queries and keys, at most twice the teacher's heads."""
    # More relation heads than attention heads carry finer relations (MiniLMv2, section 4.4)
    common = gcd(*(heads * one.head_dim for one in (student, teacher) for heads in (one.num_heads, one.num_kv_heads)))
    return max(number for number in range(1, 2 * teacher.num_heads + 1) if common % number == 0)
