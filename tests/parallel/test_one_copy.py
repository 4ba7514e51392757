"""Processes that share weights and the work of each update, against one process that makes all of it."""

import math
import os
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from distributed import run_distributed
from modelwright.core.artifacts import StorageError
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh, single
from modelwright.parallel.strategies.optimizer_in_backward import (
    OptimizerInBackward,
    ReducedInBackward,
    SharedInBackward,
    room_of_two_buckets,
)
from modelwright.parallel.strategies.shared_memory import SharedMemory, fits, has_room, shared_file, starts_of
from modelwright.parallel.strategy import Replica
from modelwright.train.techniques.gradient_clipping import clip_naive

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


def update_after_backward(world: World) -> dict[str, Tensor]:
    mesh = build_mesh(world, ParallelConfig())
    parameters, optimizer = parts()
    if not world.is_first:
        for parameter in parameters:  # the first one's values count
            parameter.data.zero_()
    assert fits(mesh, parameters)
    norms: list[float] = []
    replica = Replica(mesh=mesh, model=nn.ParameterList(parameters), optimizer=optimizer)
    with closing(SharedMemory(replica)) as strategy:
        strategy.begin(0, len(RATES))
        for number, rate in enumerate(RATES):
            strategy.before_last_backward(torch.zeros(1), is_empty=False)
            own = gradients(number, world.rank)
            for parameter, gradient in list(zip(parameters, own, strict=True))[number % 2 :]:
                (parameter * gradient).sum().backward()
            for parameter, gradient in zip(parameters, own, strict=True):
                if parameter.grad is None:  # backward does not reach all of them
                    parameter.grad = gradient
            mine = [view.tensor for view in strategy.reduce_gradients(keep)]
            norms.append(strategy.grad_norm(mine))
            for part in mine:
                part.mul_(min(1.0, MAX_NORM / norms[-1]))
            for group in optimizer.param_groups:
                group["lr"] = rate
            strategy.optimizer_step()
            optimizer.zero_grad(set_to_none=True)
        shared = [parameter.data_ptr() for parameter in parameters]
    assert all(parameter.data_ptr() != place for parameter, place in zip(parameters, shared, strict=True))
    return parts_and_norms(parameters, optimizer, norms)


def keep(gradients: list[Tensor]) -> None:
    """Gradients are not scaled."""


def update_in_backward(world: World, *, copies: bool) -> dict[str, Tensor]:
    """On one copy of the weights, or a copy for each rank. Buckets of at most 64 elements: four in all."""
    parameters, optimizer = parts()
    mesh = build_mesh(world, ParallelConfig())
    replica = Replica(mesh=mesh, model=nn.ParameterList(parameters), optimizer=optimizer)
    ready = (
        ReducedInBackward(world, bucket_bytes=256) if copies else SharedInBackward(world, parameters, bucket_bytes=256)
    )
    norms: list[float] = []
    with closing(OptimizerInBackward(replica, ready)) as strategy:
        strategy.begin(0, len(RATES))
        for number, rate in enumerate(RATES):
            for group in optimizer.param_groups:
                group["lr"] = rate
            strategy.before_last_backward(torch.zeros(1), is_empty=False)
            own = list(zip(parameters, gradients(number, world.rank), strict=True))
            reached = own[(number + world.rank) % 2 :]  # not the same parameters on all ranks
            torch.stack([(parameter * gradient).sum() for parameter, gradient in reached]).sum().backward()
            assert strategy.reduce_gradients(keep) == []
            assert all(parameter.grad is None for parameter in parameters)
            norms.append(strategy.grad_norm([]))
    return parts_and_norms(parameters, optimizer, norms)


def parts_and_norms(parameters: list[Tensor], optimizer: AdamW, norms: list[float]) -> dict[str, Tensor]:
    """Return weights and optimizer states by the number of the parameter, and the norm of each update."""
    found: dict[str, Tensor] = {"norms": torch.tensor(norms, dtype=torch.float64)}
    for number, parameter in enumerate(parameters):
        state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
        found |= {f"{number}/weight": parameter.data, **{f"{number}/{key}": value for key, value in state.items()}}
    return found


def ask_for_too_much(world: World) -> None:
    assert not has_room(world, 1 << 60)
    with pytest.raises(StorageError, match="modelwright-"), shared_file(world, 1 << 60):
        pass


def update_in_backward_on_copies(world: World) -> dict[str, Tensor]:
    return update_in_backward(world, copies=True)


def update_in_backward_on_one_copy(world: World) -> dict[str, Tensor]:
    return update_in_backward(world, copies=False)


@pytest.mark.parametrize("way", [update_after_backward, update_in_backward_on_one_copy, update_in_backward_on_copies])
@pytest.mark.parametrize("size", [2, 3])
def test_every_process_ends_with_what_one_process_computes(size, way):
    """After backward; within it, where not all parameters are reached on all ranks."""
    results = run_distributed(way, size)
    max_norm = MAX_NORM if way is update_after_backward else math.inf
    parameters, optimizer = parts()
    norms = []
    for number, rate in enumerate(RATES):
        for at, (parameter, *of_ranks) in enumerate(
            zip(parameters, *(gradients(number, rank) for rank in range(size)), strict=True)
        ):
            reached = [
                gradient
                for rank, gradient in enumerate(of_ranks)
                if way is update_after_backward or at >= (number + rank) % 2  # the first parameter not everywhere
            ]
            parameter.grad = torch.stack(reached).sum(0)
        norms.append(clip_naive([p.grad for p in parameters if p.grad is not None], max_norm))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    for found in results:
        torch.testing.assert_close(found["norms"], torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=0.0)
        for number, parameter in enumerate(parameters):
            torch.testing.assert_close(found[f"{number}/weight"], parameter.data, rtol=1e-5, atol=1e-6)
            for key, value in optimizer.state[parameter].items():
                torch.testing.assert_close(found[f"{number}/{key}"], value, rtol=1e-5, atol=1e-6)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("modelwright-")]


def test_too_little_shared_memory_is_told_to_every_process():
    run_distributed(ask_for_too_much, 2)


def test_one_process_and_other_formats_keep_what_they_have():
    mesh = build_mesh(single(), ParallelConfig())
    assert not fits(mesh, [torch.zeros(2)])


def test_gradients_in_shared_memory_are_two_buckets_instead_of_whole_ones():
    parameters, _ = parts()
    assert (
        room_of_two_buckets(parameters, bucket_bytes=256) == 2 * 64 * 3
    )  # the largest parameter is a bucket of its own
    assert room_of_two_buckets(parameters, bucket_bytes=1 << 20) == 2 * starts_of(parameters)[-1]
