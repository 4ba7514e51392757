"""Kept memory: after a few rounds allocations touch no new pages; what was kept goes back afterwards."""

import platform
import resource

import pytest
import torch

from modelwright.memory.glibc_malloc import freed_memory_kept

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are glibc's")


def faults_of_a_round():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(10_000_000) for _ in range(3)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@glibc
def test_freed_memory_is_used_again():
    with freed_memory_kept() as kept:
        assert kept
        rounds = [faults_of_a_round() for _ in range(30)]
    assert max(rounds[20:]) < 1000, "aligned blocks leave gaps at first; then every round finds its own again"
    assert faults_of_a_round() > 10_000


def test_other_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with freed_memory_kept() as kept:
        assert not kept
