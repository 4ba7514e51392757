"""Compressing transports that begin in backward."""

from pathlib import Path

import torch

from modelwright.parallel.codecs.bucketed import BucketedTransport
from modelwright.parallel.codecs.quantized import Bf16, RoundedTransport
from modelwright.parallel.mesh import single
from parallel.transport_job import CASES
from rank_processes import run_ranks


def test_buckets_in_backward_are_those_of_after_it_and_their_state_follows_the_parameters():
    for output in run_ranks(Path(__file__).with_name("bucketed_ranks.py"), size=2):
        assert output.split("\n")[:-1] == [f"held: {name}" for name in CASES if name != "exact"]


def test_one_process_alone_gets_what_was_held_back():
    transport = BucketedTransport(single(), lambda world: RoundedTransport(world, Bf16()), bucket_bytes=8)
    transport.load_state_dict({"residuals": [torch.ones(2), torch.full((3,), 2.0)], "shared": [{}, {}]})
    gradients = [torch.zeros(2), torch.zeros(3)]
    transport.arm(gradients)
    transport.reduce(gradients)
    assert [gradient.tolist() for gradient in gradients] == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    transport.close()
