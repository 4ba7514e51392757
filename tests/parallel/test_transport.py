"""Collectives and the exact transport over real gloo processes; a world of one does nothing."""

import pytest
import torch

from modelwright.parallel.gradient_sync import (
    BUCKET_BYTES,
    MANY_BUCKETS,
    SMALL_BUCKET_BYTES,
    ExactTransport,
    cut_into_buckets,
)
from modelwright.parallel.mesh import join_world, single
from rank_processes import run_ranks

WORKER = """
import sys, torch
from modelwright.parallel.mesh import join_world
from modelwright.parallel.gradient_sync import ExactTransport
torch.set_num_threads(1)
with join_world(torch.device("cpu")) as world:
    draw = torch.Generator().manual_seed(world.rank)
    tensors = [torch.randn(shape, generator=draw) for shape in ((40, 3), (7,), (), (500,), (2, 2))]
    tensors.append(torch.randn(9, generator=draw, dtype=torch.float64))
    shares = [[t.clone() for t in tensors] for _ in range(2)]
    for share, bucket_bytes in zip(shares, (64, 10**6)):
        transport = ExactTransport(world, bucket_bytes=bucket_bytes)
        transport.reduce(share)
        print(world.rank, bucket_bytes, transport.bytes_sent)
    for one, other in zip(*shares):
        torch.testing.assert_close(one, other)
    assert world.sums([1.0, world.rank]) == [2.0, 1.0]
    assert world.maxima(world.rank, -world.rank) == [1.0, 0.0]
    assert world.broadcast(torch.tensor(world.rank)).item() == 0
    world.barrier()
    total = [sum(parts) for parts in zip(*(
        [torch.randn(s, generator=g) for s in ((40, 3), (7,), (), (500,), (2, 2))]
        for g in (torch.Generator().manual_seed(r) for r in range(2))))]
    for ours, theirs in zip(shares[0], total):
        torch.testing.assert_close(ours, theirs)
"""

OVERLAPPING = """
import sys, torch
from modelwright.parallel.mesh import join_world
from modelwright.parallel.gradient_sync import ExactTransport
torch.set_num_threads(1)
with join_world(torch.device("cpu")) as world:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    parameters = list(layers.parameters())
    parameters.append(torch.nn.Parameter(torch.ones(3)))  # takes no part: its bucket is never complete in backward
    transport = ExactTransport(world, bucket_bytes=600)

    def gradients(num_rows, armed, unused):
        inputs = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(10 * num_rows + world.rank))
        for parameter in parameters:
            parameter.grad = None
        for number, part in enumerate(inputs.split(2)):
            if armed and 2 * number + 2 == num_rows:
                transport.arm(parameters[:-1] if not unused else parameters)
            hidden = part
            for layer in layers:
                hidden = torch.tanh(layer(hidden))
            hidden.sum().backward()
        begun = len(transport._in_flight)
        parameters[-1].grad = torch.full((3,), float(world.rank))
        found = [parameter.grad for parameter in (parameters if unused else parameters[:-1])]
        transport.reduce(found)
        return begun, [gradient.clone() for gradient in found]

    for num_rows in (2, 6):
        for unused in (False, True):
            none, plain = gradients(num_rows, False, unused)
            some, overlapped = gradients(num_rows, True, unused)
            assert none == 0
            assert all(torch.equal(a, b) for a, b in zip(plain, overlapped, strict=True))
            print(num_rows, unused, some)
"""


CHOSEN = """
import sys, torch
from modelwright.parallel.mesh import join_world
from modelwright.parallel.gradient_sync import ExactTransport, ring_bytes
torch.set_num_threads(1)
with join_world(torch.device("cpu")) as world:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((6, 5), (3,), (8, 4), (4, 2, 3), (5, 5))]
    rows = [torch.tensor([1, 4]), None, torch.tensor([7]), torch.tensor([0, 1, 3]), None]
    num_values = [10, 3, 4, 18, 25]
    for bucket_bytes in (16, 150, 10**6):
        for armed in (False, True):
            transport = ExactTransport(world, bucket_bytes=bucket_bytes)
            for choice, sent in ((rows, sum(num_values)), ([None] * 5, 6 * 5 + 3 + 8 * 4 + 24 + 25), (rows, 60)):
                transport.send_rows(choice)
                shares = []
                for rank in range(2):
                    draw = torch.Generator().manual_seed(rank)
                    shares.append([torch.randn(p.shape, generator=draw) for p in parameters])
                    for share, kept in zip(shares[-1], choice):
                        if kept is not None:
                            left_out = torch.ones(len(share), dtype=torch.bool).index_fill(0, kept, False)
                            share[left_out] = 0.0
                before = transport.bytes_sent
                for p in parameters:
                    p.grad = None
                if armed:
                    transport.arm(parameters)
                sum((p * share).sum() for p, share in zip(parameters, shares[world.rank])).backward()
                assert bool(transport._in_flight) == armed
                transport.reduce([p.grad for p in parameters])
                assert all(torch.equal(p.grad, a + b) for p, a, b in zip(parameters, *shares, strict=True))
                assert transport.bytes_sent - before == ring_bytes(4 * sent, 2)
            transport.close()
"""


AGAIN = """
import os, socket, torch
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import join_world, lay_out
torch.set_num_threads(1)
found = []
for _ in range(2):
    with join_world(torch.device("cpu")) as world:
        copies = lay_out(world, ParallelConfig())
        num_threads = len(os.listdir("/proc/self/task"))
        assert lay_out(world, ParallelConfig()) is copies
        assert num_threads == len(os.listdir("/proc/self/task"))
        divided = lay_out(world, ParallelConfig(shard="full"))
        assert divided.shard.size == 2 and copies.shard.size == 1
        for mesh in (copies, divided):
            assert mesh.data.sums([world.rank + 1.0]) == [3.0]
        found.append(copies)
        with socket.socket() as probe:  # a store of its own: the first one's may still answer while it goes
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] if world.rank == 0 else 0
        os.environ["MASTER_PORT"] = str(int(copies.data.sums([float(port)])[0]))
        world.barrier()
assert found[0] is not found[1]
"""


def test_an_arrangement_is_made_once_as_long_as_the_processes_stay_together(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(AGAIN)
    run_ranks(script, size=2)


def test_only_chosen_rows_are_sent(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(CHOSEN)
    run_ranks(script, size=2)


def test_sums_begin_in_the_last_backward_with_the_same_bits(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(OVERLAPPING)
    for output in run_ranks(script, size=2):
        begun = {(rows, unused): int(number) for rows, unused, number in map(str.split, output.splitlines())}
        assert begun == {("2", "False"): 2, ("6", "False"): 2, ("2", "True"): 0, ("6", "True"): 0}


def test_sums_over_two_processes_whatever_the_buckets(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    outputs = run_ranks(script, size=2)
    payload = 4 * (120 + 7 + 1 + 500 + 4) + 8 * 9
    for rank, output in enumerate(outputs):
        sent = {int(line.split()[1]): int(line.split()[2]) for line in output.splitlines()}
        assert output.startswith(str(rank))
        assert sent[10**6] == pytest.approx(payload, abs=8)
        assert sent[64] == pytest.approx(payload, abs=8)


def test_a_world_of_one_changes_and_sends_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_world(torch.device("cpu")) as world:
        assert world == single()
        assert world.is_first
        transport, gradient = ExactTransport(world), torch.ones(3)
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
