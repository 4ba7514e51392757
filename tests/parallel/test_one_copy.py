"""Processes that share weights and the work of each update, against one process that makes all of it."""

import math
import os
from pathlib import Path

import pytest
import torch
from modelwright.parallel.strategies.shared_memory_in_backward import room
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW

from modelwright.optim.clip import clip_naive
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import lay_out, single
from modelwright.parallel.strategies.shared_memory import fits, starts_of
from rank_processes import run_ranks

SCRIPT = Path(__file__).with_name("one_copy_ranks.py")
SHAPES = [(7, 5), (33,), (64, 3), (1,), (2, 2, 2)]
RATES = [0.1, 0.05, 0.2, 0.1]
MAX_NORM = 3.0


def parts() -> tuple[list[Tensor], AdamW]:
    """Parameters of odd sizes in two groups, the second before the first."""
    draw = torch.Generator().manual_seed(0)
    parameters: list[Tensor] = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return parameters, AdamW(groups, lr=1.0, fused=True)


def gradients(number: int, rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * number + rank)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


@pytest.mark.parametrize("way", ["whole", "within", "copies"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_process_ends_with_what_one_process_computes(tmp_path, size, way):
    """After backward; within it, where not all parameters are reached on all ranks."""
    run_ranks(SCRIPT, way, tmp_path, size=size)
    max_norm = MAX_NORM if way == "whole" else math.inf
    parameters, optimizer = parts()
    norms = []
    for number, rate in enumerate(RATES):
        for at, (parameter, *of_ranks) in enumerate(
            zip(parameters, *(gradients(number, rank) for rank in range(size)), strict=True)
        ):
            reached = [
                gradient
                for rank, gradient in enumerate(of_ranks)
                if way == "whole" or at >= (number + rank) % 2  # the first parameter not everywhere
            ]
            parameter.grad = torch.stack(reached).sum(0)
        norms.append(clip_naive([p.grad for p in parameters if p.grad is not None], max_norm))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    for rank in range(size):
        found = load_file(tmp_path / f"{rank}.safetensors")
        torch.testing.assert_close(found["norms"], torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=0.0)
        for number, parameter in enumerate(parameters):
            torch.testing.assert_close(found[f"{number}/weight"], parameter.data, rtol=1e-5, atol=1e-6)
            for key, value in optimizer.state[parameter].items():
                torch.testing.assert_close(found[f"{number}/{key}"], value, rtol=1e-5, atol=1e-6)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("modelwright-")]


def test_too_little_shared_memory_is_told_to_every_process(tmp_path):
    for output in run_ranks(SCRIPT, "full", tmp_path, size=2):
        assert "refused: " in output
        assert "modelwright-" in output


def test_one_process_and_other_formats_keep_what_they_have():
    mesh = lay_out(single(), ParallelConfig())
    assert not fits(mesh, [torch.zeros(2)])


def test_gradients_in_shared_memory_are_two_buckets_instead_of_whole_ones():
    parameters, _ = parts()
    assert room(parameters, bucket_bytes=256) == 2 * 64 * 3  # the largest parameter is a bucket of its own
    assert room(parameters, bucket_bytes=1 << 20) == 2 * starts_of(parameters)[-1]
