"""Rotary position embedding (Su et al. 2021) in the half-rotation layout that Hugging Face checkpoints use."""

import torch
from torch import Tensor


def rope_tables(positions_BT: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, each [B, T, 1, head_dim] in FP32, for integer positions."""
    exponents = torch.arange(0, head_dim, 2, device=positions_BT.device, dtype=torch.float32) / head_dim
    angles = positions_BT[..., None].float() * (theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(x_BTHd: Tensor, cos_BT1d: Tensor, sin_BT1d: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of the last dimension by its position's angle."""
    half = x_BTHd.shape[-1] // 2
    rotated = torch.cat((-x_BTHd[..., half:], x_BTHd[..., :half]), dim=-1)
    return (x_BTHd * cos_BT1d + rotated * sin_BT1d).to(x_BTHd.dtype)
