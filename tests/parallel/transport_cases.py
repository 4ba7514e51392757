"""Gradients and configurations that the tests of gradient transports share."""

import json

import torch

from modelwright.core.config import parse
from modelwright.parallel.gradient_sync import GradientSync
from modelwright.parallel.mesh import World
from modelwright.parallel.strategies.config import GradientSyncConfig, build_sync

SHAPES = ((120, 70), (37,), (), (4, 3, 5), (65, 80), (1,))
ROUNDS = 6
CASES = {
    "exact": {},
    "bf16": {"kind": "bf16"},
    "int8": {"kind": "int8"},
    "powersgd": {"kind": "powersgd", "powersgd_rank": 4},
    "one_percent": {"kind": "topk_quantized", "topk_quantized": {"topk_fraction": 0.01}},
    "global": {
        "kind": "topk_quantized",
        "topk_quantized": {"topk_fraction": 0.05, "selection": "global", "bucket_numel": 1000},
    },
    "warm": {
        "kind": "topk_quantized",
        "topk_quantized": {"topk_fraction": 0.01, "warmup_topk_fraction": 0.5, "warmup_messages": 4},
    },
    "momentum": {"kind": "topk_quantized", "topk_quantized": {"topk_fraction": 0.1, "momentum": 0.9}},
    "all_kept": {"kind": "topk_quantized", "topk_quantized": {"topk_fraction": 1.0, "min_bits": 16}},
}


def gradients(rank: int, round_: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the gradients of one rank in one round. Magnitudes differ much within a tensor, as
    those of gradients do."""
    draw = torch.Generator().manual_seed(100 * rank + round_)
    return [torch.randn(shape, generator=draw, dtype=dtype) ** 3 for shape in SHAPES]


def build(case: dict, world: World) -> GradientSync:
    return build_sync(parse(GradientSyncConfig, case, constants=True), world).sync


def copied(tree):
    """A state after its way through a checkpoint: other storage, tuples as lists, numbers through JSON."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, (list, tuple)) else json.loads(json.dumps(tree))
