"""Collectives and the exact transport over real gloo processes; a world of one does nothing."""

import os

import pytest
import torch
from torch import nn

from distributed import run_distributed
from modelwright.parallel.gradient_sync import (
    BUCKET_BYTES,
    MANY_BUCKETS,
    SMALL_BUCKET_BYTES,
    AllReduceSync,
    cut_into_buckets,
    ring_bytes,
)
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh, join_world, single

SIZES = ((40, 3), (7,), (), (500,), (2, 2))


def sum_in_buckets(world: World) -> dict[int, int]:
    """Return the bytes sent by bucket size."""
    draw = torch.Generator().manual_seed(world.rank)
    tensors = [torch.randn(shape, generator=draw) for shape in SIZES]
    tensors.append(torch.randn(9, generator=draw, dtype=torch.float64))
    shares = [[tensor.clone() for tensor in tensors] for _ in range(2)]
    sent = {}
    for share, bucket_bytes in zip(shares, (64, 10**6), strict=True):
        transport = AllReduceSync(world, bucket_bytes=bucket_bytes)
        transport.reduce(share)
        sent[bucket_bytes] = transport.bytes_sent
    for one, other in zip(*shares, strict=True):
        torch.testing.assert_close(one, other)
    assert world.sums([1.0, world.rank]) == [2.0, 1.0]
    assert world.maxima(world.rank, -world.rank) == [1.0, 0.0]
    assert world.broadcast(torch.tensor(world.rank)).item() == 0
    world.barrier()
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    parts = [[torch.randn(shape, generator=draw) for shape in SIZES] for draw in draws]
    for ours, theirs in zip(shares[0], zip(*parts, strict=True), strict=False):
        torch.testing.assert_close(ours, sum(theirs))
    return sent


def overlap_with_backward(world: World) -> dict[tuple[int, bool], int]:
    """Compare gradients of armed and plain backward passes; return how many sums began in backward.

    The key is the number of rows, and whether a parameter takes no part: its bucket is never complete in backward.
    """
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    parameters = [*layers.parameters(), nn.Parameter(torch.ones(3))]
    transport = AllReduceSync(world, bucket_bytes=600)

    def gradients(num_rows: int, *, armed: bool, unused: bool) -> tuple[int, list[torch.Tensor]]:
        inputs = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(10 * num_rows + world.rank))
        for parameter in parameters:
            parameter.grad = None
        for number, hidden in enumerate(inputs.split(2)):
            if armed and 2 * number + 2 == num_rows:
                transport.arm(parameters if unused else parameters[:-1])
            for layer in layers:
                hidden = torch.tanh(layer(hidden))
            hidden.sum().backward()
        begun = len(transport._in_flight)
        parameters[-1].grad = torch.full((3,), float(world.rank))
        reduced = [parameter.grad for parameter in (parameters if unused else parameters[:-1])]
        transport.reduce(reduced)
        return begun, [gradient.clone() for gradient in reduced]

    begun = {}
    for num_rows in (2, 6):
        for unused in (False, True):
            none, plain = gradients(num_rows, armed=False, unused=unused)
            begun[num_rows, unused], overlapped = gradients(num_rows, armed=True, unused=unused)
            assert none == 0
            assert all(torch.equal(a, b) for a, b in zip(plain, overlapped, strict=True))
    return begun


def send_chosen_rows(world: World) -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((6, 5), (3,), (8, 4), (4, 2, 3), (5, 5))]
    rows = [torch.tensor([1, 4]), None, torch.tensor([7]), torch.tensor([0, 1, 3]), None]
    everything = [None] * len(parameters)
    for bucket_bytes in (16, 150, 10**6):
        for armed in (False, True):
            transport = AllReduceSync(world, bucket_bytes=bucket_bytes)
            for choice, num_values in (
                (rows, 10 + 3 + 4 + 18 + 25),
                (everything, 6 * 5 + 3 + 8 * 4 + 24 + 25),
                (rows, 60),
            ):
                transport.send_rows(choice)
                shares = [share_of_rows(parameters, choice, rank) for rank in range(2)]
                before = transport.bytes_sent
                for parameter in parameters:
                    parameter.grad = None
                if armed:
                    transport.arm(parameters)
                products = [(p * share).sum() for p, share in zip(parameters, shares[world.rank], strict=True)]
                torch.stack(products).sum().backward()
                assert bool(transport._in_flight) == armed
                transport.reduce([parameter.grad for parameter in parameters])
                for parameter, one, other in zip(parameters, *shares, strict=True):
                    assert torch.equal(parameter.grad, one + other)
                assert transport.bytes_sent - before == ring_bytes(4 * num_values, 2)
            transport.close()


def share_of_rows(parameters, choice, rank: int) -> list[torch.Tensor]:
    """Return a gradient of each parameter that is zero in rows that are not chosen."""
    draw = torch.Generator().manual_seed(rank)
    shares = [torch.randn(parameter.shape, generator=draw) for parameter in parameters]
    for share, chosen in zip(shares, choice, strict=True):
        if chosen is not None:
            share[torch.ones(len(share), dtype=torch.bool).index_fill(0, chosen, False)] = 0.0
    return shares


def build_one_mesh_twice() -> None:
    """The same layout must start no thread again."""
    with join_world(torch.device("cpu")) as world:
        copies = build_mesh(world, ParallelConfig())
        num_threads = len(os.listdir("/proc/self/task"))
        assert build_mesh(world, ParallelConfig()) is copies
        assert num_threads == len(os.listdir("/proc/self/task"))
        divided = build_mesh(world, ParallelConfig(zero_stage=3))
        assert divided.shard.size == 2
        assert copies.shard.size == 1
        for mesh in (copies, divided):
            assert mesh.data.sums([world.rank + 1.0]) == [3.0]
        world.barrier()


def test_a_mesh_is_built_once_as_long_as_the_processes_stay_together():
    run_distributed(build_one_mesh_twice, 2, joins_world=False)


def test_only_chosen_rows_are_sent():
    run_distributed(send_chosen_rows, 2)


def test_sums_begin_in_the_last_backward_with_the_same_bits():
    for begun in run_distributed(overlap_with_backward, 2):
        assert begun == {(2, False): 2, (6, False): 2, (2, True): 0, (6, True): 0}


def test_sums_over_two_processes_whatever_the_buckets():
    payload = 4 * (120 + 7 + 1 + 500 + 4) + 8 * 9
    for sent in run_distributed(sum_in_buckets, 2):
        assert sent[10**6] == pytest.approx(payload, abs=8)
        assert sent[64] == pytest.approx(payload, abs=8)


def test_a_world_of_one_changes_and_sends_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_world(torch.device("cpu")) as world:
        assert world == single()
        assert world.is_first
        transport, gradient = AllReduceSync(world), torch.ones(3)
        transport.reduce([gradient])
        assert transport.bytes_sent == 0
        assert torch.equal(gradient, torch.ones(3))
        assert world.sums([2.5]) == [2.5]
        assert world.maxima(True, 0.5) == [True, 0.5]


@pytest.mark.parametrize(
    ("num_tensors", "num_values", "num_buckets"),
    [
        (40, 20_000, MANY_BUCKETS),  # all would fit into one message, which could not begin before backward ends
        (40, 1_000, 1),
        (4, SMALL_BUCKET_BYTES, 4),
        (400, 2**20, 400 * 2**22 // BUCKET_BYTES + 1),
    ],
)
def test_small_models_make_several_messages_too(num_tensors, num_values, num_buckets):
    tensors = [torch.empty(num_values, device="meta") for _ in range(num_tensors)]
    buckets = cut_into_buckets(tensors, BUCKET_BYTES, many=MANY_BUCKETS)
    assert [id(one) for bucket in reversed(buckets) for one in bucket] == [id(one) for one in tensors]
    assert len(buckets) == pytest.approx(num_buckets, abs=num_buckets // 8 + 1 if num_buckets > 1 else 0)
    assert all(sum(4 * one.numel() for one in bucket) <= BUCKET_BYTES for bucket in buckets)
