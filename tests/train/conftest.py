"""The tiny run as a fixture; one thread, so that figures repeat."""

from types import ModuleType

import pytest
import tiny_run
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever tests before this one have left: the number of threads decides last bits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    torch.set_num_threads(1)
    return tiny_run
