"""Shared by tests of operators."""

import pytest

from modelwright.ops import cpu_kernels


@pytest.fixture(params=["own kernels", "PyTorch's operators"])
def either_way(request, monkeypatch):
    """With this package's kernels for the processor, and as where they cannot be had."""
    if request.param == "own kernels" and cpu_kernels.kernels() is None:
        pytest.skip("there is no C++ compiler here")
    if request.param != "own kernels":
        monkeypatch.setattr(cpu_kernels, "kernels", lambda: None)
