"""Replicas are compared to the last bit, with the culprit named."""

import json

import pytest
import torch

from modelwright.train.monitors.replica_check import CHUNK, ReplicaCheck, ReplicaError, bits_hash


class Ranks:
    """A channel whose other ranks say what this one says, but for what was changed."""

    def __init__(self, size, change):
        self.size = size
        self.change = change

    def exchange(self, value, *, what):
        return [self.change(rank, json.loads(json.dumps(value))) for rank in range(self.size)]


def changed(rank_with_error, index):
    def change(rank, entries):
        if rank == rank_with_error:
            key, value = entries[index]
            entries[index] = key, value + 1
        return entries

    return change


WEIGHTS = {"a": torch.randn(5, 3), "b": torch.randn(7).bfloat16(), "c": torch.tensor([True, False])}


def test_equal_replicas_pass():
    ReplicaCheck(Ranks(3, lambda rank, entries: entries), lambda: WEIGHTS, every=2).check(4)


def test_the_tensor_and_the_rank_that_differs_are_named():
    check = ReplicaCheck(Ranks(3, changed(1, 1)), lambda: WEIGHTS, every=2)
    with pytest.raises(ReplicaError, match=r"step 4: replicas of 1 tensors differ: b on rank 1:"):
        check.check(4)
    with pytest.raises(ReplicaError, match=r"a on ranks \[0, 1\]"):
        ReplicaCheck(Ranks(2, changed(0, 0)), lambda: WEIGHTS, every=2).check(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_every_bit_counts(dtype):
    tensor = torch.randn(13, 3).mul(50).to(dtype)
    hashes = {int(bits_hash(tensor))}
    raw = tensor.view(torch.uint8)
    for place in range(0, raw.numel(), 5):
        for bit in range(8):
            raw.view(-1)[place] ^= 1 << bit
            hashes.add(int(bits_hash(tensor)))
            raw.view(-1)[place] ^= 1 << bit
    assert len(hashes) == 1 + 8 * len(range(0, raw.numel(), 5))


def test_places_and_signs_count_and_chunks_do_not():
    tensor = torch.randn(CHUNK + 3)
    swapped = tensor.clone()
    swapped[[1, CHUNK + 1]] = tensor[[CHUNK + 1, 1]]
    assert bits_hash(tensor) != bits_hash(swapped)
    assert bits_hash(torch.tensor([0.0])) != bits_hash(torch.tensor([-0.0]))
    assert bits_hash(tensor[::2]) == bits_hash(tensor[::2].clone())
    assert int(bits_hash(torch.zeros(0))) == 0
