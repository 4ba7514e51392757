"""`VisionTower`: a vision transformer from pixels to one vector for each image, or one for each patch, in the form of
CLIP and SigLIP: layer norm before attention and feed-forward, biases everywhere.

Legend: N images, C colors, S pixels of a side, P patches, T tokens, D width, H heads, d head width.
"""

# PyTorch leaves the types of chunk, unflatten and of a module's result open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.model.vision.config import TowerActivation, VisionConfig

NUM_COLORS = 3


class VisionTower(nn.Module):
    """Patch embedding, learned positions, pre-norm blocks (Dosovitskiy et al. 2021), and a pooled output."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        dim, eps, has_class_token = config.model_dim, config.norm_eps, config.pooling == "class_token"
        patch = config.patch_size
        self.patches = nn.Conv2d(NUM_COLORS, dim, kernel_size=patch, stride=patch, bias=not has_class_token)
        self.class_token = nn.Parameter(torch.empty(dim)) if has_class_token else None
        self.positions = nn.Parameter(torch.empty(config.num_tokens, dim))
        self.norm_in = nn.LayerNorm(dim, eps=eps) if has_class_token else nn.Identity()
        self.blocks = nn.ModuleList(
            EncoderBlock(dim, config.num_heads, config.ffn_dim, config.activation, eps)
            for _ in range(config.num_layers)
        )
        self.norm_out = nn.LayerNorm(dim, eps=eps)
        self.pool = None if has_class_token else AttentionPool(config)
        init_encoder(self, embedding_std=config.embedding_std, num_layers=config.num_layers)

    def forward(self, pixels_NCSS: Tensor) -> Tensor:
        """Vectors of images [N, D]. pixels_NCSS: bytes [N, 3, S, S], or floats that are normalized already."""
        hidden_NTD = self.run_blocks(pixels_NCSS)
        if self.pool is None:
            return self.norm_out(hidden_NTD[:, 0])
        return self.pool(self.norm_out(hidden_NTD))

    def patch_states(self, pixels_NCSS: Tensor, *, num_blocks: int = 0) -> Tensor:
        """Vectors of patches [N, P, D], row by row, after `num_blocks` blocks (0: all), without the last norm."""
        hidden_NTD = self.run_blocks(pixels_NCSS, num_blocks=num_blocks)
        return hidden_NTD[:, self.config.num_tokens - self.config.num_patches :]

    def run_blocks(self, pixels_NCSS: Tensor, *, num_blocks: int = 0) -> Tensor:
        """Residual stream of all tokens after `num_blocks` blocks, 0 for all, [N, T, D]."""
        shape = (NUM_COLORS, self.config.image_size, self.config.image_size)
        if pixels_NCSS.shape[1:] != shape:
            raise ValueError(f"images of {list(pixels_NCSS.shape[1:])}, where the tower reads {list(shape)}")
        hidden_NTD = self.patches(self.normalized(pixels_NCSS)).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            class_N1D = self.class_token.expand(len(hidden_NTD), 1, -1)
            hidden_NTD = torch.cat([class_N1D, hidden_NTD], dim=1)
        hidden_NTD = self.norm_in(hidden_NTD + self.positions)
        for block in self.blocks[: num_blocks or len(self.blocks)]:
            hidden_NTD = block(hidden_NTD)
        return hidden_NTD

    def normalized(self, pixels_NCSS: Tensor) -> Tensor:
        """Returns normalized pixels in the format of the weights; floats are normalized already."""
        dtype, device = self.patches.weight.dtype, pixels_NCSS.device
        if pixels_NCSS.is_floating_point():
            return pixels_NCSS.to(dtype)
        mean_C11 = torch.tensor(self.config.pixel_mean, dtype=dtype, device=device)[:, None, None]
        std_C11 = torch.tensor(self.config.pixel_std, dtype=dtype, device=device)[:, None, None]
        return (pixels_NCSS.to(dtype) / 255.0 - mean_C11) / std_C11


class AttentionPool(nn.Module):
    """Attention of a learned query and a feed-forward layer (Zhai et al. 2022, section 3.2; SigLIP's head)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim = config.model_dim
        self.num_heads = config.num_heads
        self.probe = nn.Parameter(torch.empty(1, 1, dim))
        self.qkv_proj, self.o_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.ffn = EncoderFeedForward(dim, config.ffn_dim, config.activation)

    def forward(self, hidden_NTD: Tensor) -> Tensor:
        """Pools hidden states [N, T, D] to vectors [N, D]."""
        weights, biases = self.qkv_proj.weight.chunk(3), self.qkv_proj.bias.chunk(3)
        inputs = (self.probe.expand(len(hidden_NTD), -1, -1), hidden_NTD, hidden_NTD)
        q_NH1d, k_NHTd, v_NHTd = (
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        attended_NH1d = F.scaled_dot_product_attention(q_NH1d, k_NHTd, v_NHTd)
        pooled_ND = self.o_proj(attended_NH1d.transpose(1, 2).flatten(-2))[:, 0]
        return pooled_ND + self.ffn(self.norm(pooled_ND))


class EncoderAttention(nn.Module):
    """Self-attention over whole sequences."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x_NTD: Tensor) -> Tensor:
        q_NHTd, k_NHTd, v_NHTd = (
            projection(x_NTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_NHTd = F.scaled_dot_product_attention(q_NHTd, k_NHTd, v_NHTd)
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

    def forward(self, hidden_NTD: Tensor) -> Tensor:
        hidden_NTD = hidden_NTD + self.attention(self.attention_norm(hidden_NTD))
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
