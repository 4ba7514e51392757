"""Transformer blocks of the encoders in CLIP and SigLIP: layer norm before attention and feed-forward, biases
everywhere.

Legend: N images or texts, T tokens, D width, H heads, d head width.
"""

# PyTorch leaves the types of chunk, unflatten and of a module's result open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.model.vision.config import TowerActivation


class EncoderAttention(nn.Module):
    """Self-attention over whole sequences."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x_NTD: Tensor, *, is_causal: bool) -> Tensor:
        q_NHTd, k_NHTd, v_NHTd = (
            projection(x_NTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_NHTd = F.scaled_dot_product_attention(q_NHTd, k_NHTd, v_NHTd, is_causal=is_causal)
        return self.o_proj(out_NHTd.transpose(1, 2).flatten(-2))


class EncoderFeedForward(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, dim: int, ffn_dim: int, activation: TowerActivation) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.activation: TowerActivation = activation

    def forward(self, x_NTD: Tensor) -> Tensor:
        hidden_NTF = self.up_proj(x_NTD)
        if self.activation == "quick_gelu":
            return self.down_proj(hidden_NTF * torch.sigmoid(1.702 * hidden_NTF))
        return self.down_proj(F.gelu(hidden_NTF, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each behind a layer norm and added to the residual stream."""

    def __init__(self, dim: int, num_heads: int, ffn_dim: int, activation: TowerActivation, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=eps)
        self.attention = EncoderAttention(dim, num_heads)
        self.ffn_norm = nn.LayerNorm(dim, eps=eps)
        self.ffn = EncoderFeedForward(dim, ffn_dim, activation)

    def forward(self, hidden_NTD: Tensor, *, is_causal: bool = False) -> Tensor:
        hidden_NTD = hidden_NTD + self.attention(self.attention_norm(hidden_NTD), is_causal=is_causal)
        return hidden_NTD + self.ffn(self.ffn_norm(hidden_NTD))


@torch.no_grad()
def init_encoder(module: nn.Module, *, embedding_std: float, num_layers: int) -> None:
    """Draw weights from PyTorch's default generator, in parameter order: matrices with the standard deviation
    1 / sqrt(inputs), divided by sqrt(2 * layers) at the end of a residual branch; embeddings with `embedding_std`.
    Biases are zero and norms neutral.
    """
    # A fixed 0.02 is too small for narrow towers: all images start with the same output, and training hardly leaves it
    norms = {name for name, one in module.named_modules() if isinstance(one, nn.LayerNorm)}
    matrices = {name for name, one in module.named_modules() if isinstance(one, nn.Linear | nn.Conv2d)}
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        if owner in norms:
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif owner in matrices:
            is_last = owner.endswith(("o_proj", "down_proj"))
            parameter.normal_(0.0, parameter[0].numel() ** -0.5 / (2 * num_layers if is_last else 1) ** 0.5)
        else:
            parameter.normal_(0.0, embedding_std)
