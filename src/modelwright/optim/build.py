"""The optimizer of a model: AdamW, fused, with weight decay on matrices only. Knows no schedule and no step."""

from torch import nn
from torch.optim import AdamW, Optimizer

from modelwright.optim.offload import OffloadedAdamW


def build_adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    offload: bool = False,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over the trainable parameters in the order of their names.

    Parameters of two and more dimensions decay; norms and biases do not. One fused kernel updates all of them; with
    `offload` the host does, and keeps the states.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if offload:
        return OffloadedAdamW(groups, lr=learning_rate, betas=betas, eps=eps)
    return AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)
