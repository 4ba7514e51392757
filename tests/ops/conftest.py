"""Shared by tests of operators."""

import pytest

from modelwright.ops import cpu_kernels


@pytest.fixture(params=["own kernels", "PyTorch's operators"])
def either_way(request, monkeypatch):
    """With this package's kernels for the processor, and as where they cannot be had."""
    if request.param == "own kernels" and not cpu_kernels.instruction_set():
        pytest.skip("there is no C++ compiler here")
    names = cpu_kernels.KERNELS if request.param == "own kernels" else ()
    monkeypatch.setenv(cpu_kernels.SWITCH, ",".join(names) or "0")
