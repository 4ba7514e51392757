"""A competent training loop without any technique of this project: what claims about the whole stack compare with.

FP32, by PyTorch's own products or by oneDNN's (`precision.fp32_matmul`), one piece of a document a row, padded to the
longest of the batch, PyTorch's own operators and nothing compiled, whole logits, AdamW, clipping, warmup and cosine;
over several hosts `DistributedDataParallel`, which overlaps its exact sums with backward. It trains the weights of a
`Decoder`, so that both sides begin and are judged alike. Nothing of the product uses it.
"""

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Block, Decoder
from modelwright.parallel.mesh import World
from modelwright.train.config import TrainConfig
from modelwright.train.precision.apply import fp32_products
from modelwright.train.techniques.learning_rate import rate_factor


class PlainDecoder(nn.Module):
    """The usual way to write the same model; mean loss of a padded batch."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        config = self.model.config
        x = self.model.embedding(tokens_BT)
        half = torch.arange(0, config.head_dim, 2, device=x.device) / config.head_dim
        angles = torch.arange(tokens_BT.shape[1], device=x.device)[:, None] / config.rope_theta**half
        cos, sin = (torch.cat([f, f], dim=-1) for f in (angles.cos(), angles.sin()))
        for block in self.model.blocks.values():
            assert isinstance(block, Block)
            x = x + self._attend(block, _norm(x, block.attention_norm), cos, sin)
            y = _norm(x, block.ffn_norm)
            gated = F.silu(F.linear(y, block.ffn.gate_proj.weight)) * F.linear(y, block.ffn.up_proj.weight)
            x = x + F.linear(gated, block.ffn.down_proj.weight)
        logits = F.linear(_norm(x, self.model.norm), self.model.head_weight)
        return F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED)

    def _attend(self, block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention, width = block.attention, self.model.config.head_dim
        q, k, v = (
            F.linear(x, projection.weight).unflatten(-1, (-1, width)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.model.config.qk_norm:
            q, k = _norm(q, attention.q_norm), _norm(k, attention.k_norm)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(out.transpose(1, 2).flatten(-2), attention.o_proj.weight)


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    weight = norm.get_parameter("weight")
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def train_plainly(
    model: Decoder, batches: Iterator[TokenBatch], config: TrainConfig, *, num_steps: int, world: World
) -> float:
    """Train the weights in place and return the seconds of all steps, waiting for batches included."""
    with fp32_products(onednn=config.precision.fp32_matmul == "onednn"):
        plain = PlainDecoder(model)
        wrapped = DistributedDataParallel(plain) if world.size > 1 else plain
        matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = AdamW(groups, config.learning_rate, config.betas, config.adam_eps, fused=True)
        started = time.perf_counter()
        for step in range(num_steps):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * rate_factor(config.schedule, step, num_steps)
            batch = next(batches)
            longest = int((batch.segments_BT >= 0).sum(dim=1).max())
            loss = wrapped(batch.input_ids_BT[:, :longest], batch.labels_BT[:, :longest])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
        return time.perf_counter() - started
