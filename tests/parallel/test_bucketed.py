"""Compressing transports that begin in backward, against twins that run after it."""

import pytest
import torch
from torch import Tensor, nn

from distributed import run_distributed
from modelwright.parallel.codecs.bucketed import BucketedSync
from modelwright.parallel.codecs.quantized import Bf16Codec, QuantizedSync
from modelwright.parallel.gradient_sync import GradientSync
from modelwright.parallel.mesh import World, duplicate_group, single
from parallel.transport_cases import CASES, SHAPES, build, copied, gradients

BUCKET_BYTES = 20_000
BUCKETS = [range(5, 6), range(4, 5), range(1, 4), range(1)]
"""By hand, from the last: 4 bytes, 20,800, then 240 + 4 + 148, then 33,600; what does not fit begins a new one."""
ROUNDS = 6
COMPRESSING = [name for name in CASES if name != "exact"]


def backward(parameters: list[Tensor], rank: int, round_: int) -> None:
    own = gradients(rank, round_)
    sum((p * gradient).sum() for p, gradient in zip(parameters, own, strict=True)).backward()  # pyright: ignore


def check(world: World, name: str) -> None:
    built = []

    def make(apart: World) -> GradientSync:
        bucketed = build(CASES[name], apart)
        assert isinstance(bucketed, BucketedSync)
        built.append(bucketed)
        return bucketed._make(apart)

    apart = duplicate_group(world)
    twins = [make(world) for _ in BUCKETS]
    transport = BucketedSync(apart, make, bucket_bytes=BUCKET_BYTES)
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for round_ in range(ROUNDS):
        if round_ == 3:
            state = copied(transport.state_dict())
            assert [tensor.shape for tensor in state["residuals"]] == [torch.Size(shape) for shape in SHAPES]
            transport.close()
            transport = BucketedSync(apart, make, bucket_bytes=BUCKET_BYTES)
            transport.load_state_dict(state)
        transport.arm(parameters)
        backward(parameters, world.rank, round_)
        assert len(transport._in_flight) == len(BUCKETS), "all gradients are there: all buckets are on their way"
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        transport.reduce(found)
        wanted = gradients(world.rank, round_)
        for twin, bucket in zip(twins, BUCKETS, strict=True):
            twin.reduce([wanted[number] for number in bucket])
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other), name
        for parameter in parameters:
            parameter.grad = None
    state = copied(transport.state_dict())
    transport.close()
    whole = BucketedSync(apart, make, bucket_bytes=10**9)
    whole.load_state_dict(state)
    whole.reduce(gradients(world.rank, ROUNDS))
    assert len(whole.state_dict()["shared"]) == 1
    whole.close()
    for one in built:
        one.close()
    assert transport.bytes_sent > 0


def check_all(world: World) -> None:
    for name in COMPRESSING:
        check(world, name)


@pytest.mark.slow
def test_buckets_in_backward_are_those_of_after_it_and_their_state_follows_the_parameters():
    run_distributed(check_all, 2)


def test_one_process_alone_gets_what_was_held_back():
    transport = BucketedSync(single(), lambda world: QuantizedSync(world, Bf16Codec()), bucket_bytes=8)
    transport.load_state_dict({"residuals": [torch.ones(2), torch.full((3,), 2.0)], "shared": [{}, {}]})
    gradients = [torch.zeros(2), torch.zeros(3)]
    transport.arm(gradients)
    transport.reduce(gradients)
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    transport.close()
