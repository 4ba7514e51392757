"""The decoder: RMSNorm, rotary grouped-query attention with optional QK-norm, SwiGLU, optionally tied embeddings.

Single-device code. Attention is a parameter: every layer passes its queries, keys and values to an `Attend` function,
which training builds from a mask and inference from a KV cache. It returns hidden states; `logits` and `cross_entropy`
are what its head makes of them. Blocks are named by layer, so a pipeline stage keeps their names.

Legend: B rows, T tokens, D model width, H query heads, K key/value heads, d head width, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.model.config import ModelConfig
from modelwright.ops.cross_entropy import linear_cross_entropy
from modelwright.ops.norm import rms_norm
from modelwright.ops.rope import apply_rope, rope_tables
from modelwright.ops.swiglu import swiglu

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, q_BTHd, k_BTKd, v_BTKd) -> out_BTHd`; rotary positions are applied already."""
Product = Callable[[Tensor, Tensor], Tensor]
"""`(x [..., I], weight [O, I]) -> [..., O]`."""


class Linear(nn.Linear):
    """A projection without bias. `product` multiplies: the hook for other number formats and for products that skip a
    part.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)  # pyright: ignore[reportUnknownMemberType]
        self.product: Product = F.linear

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned scale. out_dtype: None is the input's; in_fp32:
    computed in FP32 whatever the input's format.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.out_dtype: torch.dtype | None = None
        self.in_fp32 = True

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight)

    def norm(self, x: Tensor, weight_D: Tensor) -> Tensor:
        return rms_norm(x, weight_D, self.eps, out_dtype=self.out_dtype, in_fp32=self.in_fp32)


class Attention(nn.Module):
    """Grouped-query self-attention around an `Attend` function."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        query_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.model_dim, query_dim)
        self.k_proj = Linear(config.model_dim, kv_dim)
        self.v_proj = Linear(config.model_dim, kv_dim)
        self.o_proj = Linear(query_dim, config.model_dim)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q_BTHd = self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        k_BTKd = self.k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        v_BTKd = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        out_BTHd = attend(self.layer, apply_rope(q_BTHd, cos, sin), apply_rope(k_BTKd, cos, sin), v_BTKd)
        return self.o_proj(out_BTHd.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.model_dim, config.ffn_dim)
        self.up_proj = Linear(config.model_dim, config.ffn_dim)
        self.down_proj = Linear(config.ffn_dim, config.model_dim)
        self.activation_in_fp32 = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_proj(x_BTD), self.up_proj(x_BTD)
        return self.down_proj(swiglu(gate_BTF, up_BTF, in_fp32=self.activation_in_fp32))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream. is_recomputed: its activations are
    recomputed for backward.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.is_recomputed = False
        self.attention_norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        hidden_BTD = hidden_BTD + self.attention(self.attention_norm(hidden_BTD), cos, sin, attend)
        return hidden_BTD + self.ffn(self.ffn_norm(hidden_BTD))


@dataclass
class EndFormats:
    """Formats at the ends of a model, shared by its pipeline stages. stream_dtype: of the residual stream; head_dtype:
    of the products of head and loss. None is that of the weights.
    """

    stream_dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    loss_in_fp32: bool = True

    def reset(self) -> None:
        self.stream_dtype, self.head_dtype, self.loss_in_fp32 = None, None, True


class Decoder(nn.Module):
    """A decoder-only transformer; passes (checkpointing, compile, sharding) work on `blocks`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.ends = EndFormats()
        self.embedding = nn.Embedding(config.vocab_size, config.model_dim)
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(config.num_layers)})
        self.norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.model_dim, config.vocab_size)

    @property
    def head_weight(self) -> Tensor:
        """The output projection [V, D]: the embedding itself if tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Hidden states [B, T, D] after the final norm.

        tokens_BT, positions_BT: int64 [B, T]; positions restart at 0 in each packed document.
        """
        return self.norm(self.run_blocks(self.embed(tokens_BT), positions_BT, attend))

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream [B, T, D] before all blocks."""
        hidden_BTD = self.embedding(tokens_BT)
        return hidden_BTD.to(self.ends.stream_dtype) if self.ends.stream_dtype else hidden_BTD

    def run_blocks(self, hidden_BTD: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """The residual stream [B, T, D] after all blocks in this process."""
        cos, sin = rope_tables(positions_BT, self.config.head_dim, self.config.rope_theta)
        for block in self.blocks.values():
            hidden_BTD = block(hidden_BTD, cos, sin, attend)
        return hidden_BTD

    def projections(self) -> dict[str, Linear]:
        """The linear layers of the blocks in this process, by name."""
        named = cast(Iterator[tuple[str, nn.Module]], self.blocks.named_modules())
        return {f"blocks.{name}": module for name, module in named if isinstance(module, Linear)}

    def cross_entropy(self, hidden_BTD: Tensor, labels_BT: Tensor, *, chunk_tokens: int) -> Tensor:
        """Sum of the labels' negative log-likelihoods (nats), FP32; logits exist for at most `chunk_tokens` tokens at a
        time. It is a method because only the model knows where its head is. Labels of -100 do not count and cost
        nothing.
        """
        hidden_ND, labels_N = hidden_BTD.flatten(0, 1), labels_BT.flatten()
        return linear_cross_entropy(
            hidden_ND,
            self.head_weight,
            labels_N,
            chunk_tokens=chunk_tokens,
            compute=self.ends.head_dtype,
            in_fp32=self.ends.loss_in_fp32,
        )

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits [..., V]. Training calls `cross_entropy` instead."""
        if self.head is None:
            return F.linear(hidden_BTD, self.embedding.weight.to(hidden_BTD.dtype))
        return self.head(hidden_BTD)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal initialization, residual projections scaled by 1/sqrt(2 * layers) (GPT-2); norms to one.

        Drawn on the CPU from `seed` in parameter order, so that every device and every layout starts equal.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = self.config.init_std
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std = residual_std
            elif name == "embedding.weight":
                std = self.config.embedding_init_std
            draw = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            parameter.copy_(draw)
