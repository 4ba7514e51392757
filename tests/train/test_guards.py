"""Replicas are compared to the last bit, with the culprit named; outlying batches are recorded and left out."""

import json
import math

import pytest
import torch

from modelwright.core.errors import ConfigError
from modelwright.optim.update import Context
from modelwright.train.monitors.replica_check import CHUNK, Quarantine, QuarantineConfig, ReplicaCheck, ReplicaError, bits_hash


class Ranks:
    """A channel whose other ranks say what this one says, but for what was changed."""

    def __init__(self, size, change):
        self.size = size
        self.change = change

    def exchange(self, value, *, what):
        return [self.change(rank, list(value)) for rank in range(self.size)]


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
    with pytest.raises(ReplicaError, match=r"step 4: copies of 1 tensors differ: b on rank 1:"):
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


def quarantine(tmp_path, **config):
    return Quarantine(QuarantineConfig(**config), lambda flag: flag, tmp_path / "quarantine.jsonl", is_first=True)


def feed(guard, norms, first=0):
    skipped = []
    for step, norm in enumerate(norms, start=first):
        context = Context(step=step, num_steps=100, gradients=[], loss=1.0, grad_norm=norm)
        context.skip = not math.isfinite(norm)
        guard.apply(context)
        skipped.append(context.skip)
    return skipped


def test_outliers_are_left_out_and_recorded(tmp_path):
    guard = quarantine(tmp_path, factor=5.0, window=9)
    assert feed(guard, [9.0, 1.0, 1.2, 0.9, 1.1, 30.0, 1.0, math.inf, 4.9]) == [False] * 5 + [True, False, True, False]
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["batch"], line["kind"]) for line in lines] == [(5, "outlier"), (7, "not finite")]
    assert lines[0]["norm"] == 30.0
    assert lines[0]["median"] == 1.1


def test_off_by_default_and_not_judged_early(tmp_path):
    assert not any(feed(quarantine(tmp_path), [1.0] * 50 + [1e9]))
    assert not any(feed(quarantine(tmp_path, factor=2.0, window=30), [1.0] * 9 + [1e9]))


def test_a_new_level_is_accepted(tmp_path):
    guard = quarantine(tmp_path, factor=3.0, window=9, max_in_a_row=3)
    assert feed(guard, [1.0] * 9 + [10.0] * 6) == [False] * 9 + [True] * 3 + [False] * 3


def test_it_goes_on_after_a_resume_as_if_nothing_had_happened(tmp_path):
    norms = [1.0] * 9 + [10.0] * 2
    whole, first = quarantine(tmp_path / "a", factor=3.0, window=9), quarantine(tmp_path / "b", factor=3.0, window=9)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    feed(whole, norms)
    feed(first, norms)
    second = quarantine(tmp_path / "c", factor=3.0, window=9)
    (tmp_path / "c").mkdir()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    more = [10.0, 10.0, 1.0, 40.0]
    assert feed(second, more, first=11) == feed(whole, more, first=11)
    assert (tmp_path / "c" / "quarantine.jsonl").read_text() == (tmp_path / "a" / "quarantine.jsonl").read_text()


def test_a_repeated_step_is_recorded_once(tmp_path):
    """After a crash: from a checkpoint that had no batch yet, or from the beginning."""
    good, bad = [1.0] * 9, [10.0]
    before = quarantine(tmp_path, factor=3.0, window=9)
    feed(before, good)
    state = json.loads(json.dumps(before.state_dict()))
    feed(before, bad, first=9)
    again = quarantine(tmp_path, factor=3.0, window=9)
    again.load_state_dict(state)
    assert (tmp_path / "quarantine.jsonl").read_text() == ""
    for guard, norms, first in ((again, bad, 9), (quarantine(tmp_path, factor=3.0, window=9), good + bad, 0)):
        feed(guard, norms, first=first)
        assert [json.loads(line)["batch"] for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()] == [9]


def test_all_ranks_leave_out_what_any_finds(tmp_path):
    guard = Quarantine(QuarantineConfig(factor=3.0), lambda flag: 1.0, tmp_path / "x", is_first=False)
    assert feed(guard, [1.0]) == [True]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"window": 3}, {"max_in_a_row": 0}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: "):
        QuarantineConfig(**wrong)
